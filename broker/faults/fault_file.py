"""The file with this broker's faults, read again and again.

The problem: a test orders a fault from outside, and must know when it holds; and the broker must still hear of its
healing while its disk is slow or its network is cut.

The choice: a file, which is also the memory of the fault over a restart of the broker. A thread of its own reads it
every few milliseconds, and writes the revision that holds into a file beside it. Rejected: a request, which a broker
that is cut off does not receive; a signal, which cannot be answered.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

import msgspec

from minibroker.protocol.faults import Faults, Obeyed, broker_of, decoded, encoded, obeyed_path
from minibroker.protocol.world import Disk

logger = logging.getLogger("minibroker.faults")

_LOOK_EVERY_S = 0.02

FaultListener = Callable[[Faults], None]


class FaultFile:
    """The faults in the file at `path`. `disk` is the real one. Any thread may read `current`."""

    def __init__(self, path: str, disk: Disk) -> None:
        self.path = path
        self.current = Faults()
        self._disk = disk
        self._seen: bytes | None = None
        self._revision = 0
        """The revision that holds."""
        self._is_acknowledged = True
        """Whether the file beside it says so. Otherwise it is written again."""
        self._ports: list[int] = []
        self._peers: dict[int, tuple[int, ...]] = {}
        """The ports that each other broker has published, as far as they could be read last."""
        self._lock = threading.Lock()
        self._listeners: list[FaultListener] = []
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="faults", daemon=True)

    def on_change(self, listener: FaultListener) -> None:
        """Call `listener` at each change, in the thread that reads the file."""
        self._listeners.append(listener)

    def start(self) -> None:
        """Obey the file as it is, and follow it from then on."""
        logger.warning("this broker obeys the faults in %s: it is for tests, not for data that matters", self.path)
        self.look()
        self._thread.start()

    def close(self) -> None:
        self._ends.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Read the file if it has changed. A file that makes no sense leaves the faults as they were."""
        try:
            data = self._disk.read_file(self.path)
        except FileNotFoundError:
            data = b""
        except OSError as error:
            logger.warning("%s cannot be read, and its faults stay as they are: %s", self.path, error)
            return
        if data == self._seen:
            if not self._is_acknowledged:
                self._acknowledge()
            return
        self._seen = data
        try:
            faults = decoded(data) if data else Faults()
        except ValueError as error:
            logger.warning("%s makes no sense, and its faults stay as they are: %s", self.path, error)
            return
        self.current = faults
        for listener in self._listeners:
            listener(faults)
        self._revision = faults.revision
        self._acknowledge()

    def listens_on(self, port: int) -> None:
        """Publish a port of this broker, by which other brokers know a connection to it."""
        with self._lock:
            self._ports.append(port)
        self._acknowledge()

    def peers(self) -> dict[int, int]:
        """Return the broker behind each published port of the other brokers. Files that cannot be read, for instance
        for want of descriptors, change nothing, or a cut between brokers would end."""
        directory, own = os.path.split(obeyed_path(self.path))
        with contextlib.suppress(OSError):
            named = [(broker_of(name), name) for name in self._disk.list(directory) if name != own]
            self._peers = {
                id: self._ports_of(id, os.path.join(directory, name)) for id, name in named if id is not None
            }
        return {port: broker_id for broker_id, ports in self._peers.items() for port in ports}

    def _ports_of(self, broker_id: int, path: str) -> tuple[int, ...]:
        try:
            return msgspec.json.decode(self._disk.read_file(path), type=Obeyed).ports
        except (OSError, msgspec.MsgspecError):
            return self._peers.get(broker_id, ())

    def _acknowledge(self) -> None:
        with self._lock:
            try:
                self._disk.write_atomically(obeyed_path(self.path), encoded(Obeyed(self._revision, tuple(self._ports))))
            except OSError as error:
                if self._is_acknowledged:
                    logger.warning("%s cannot be written, trying again: %s", obeyed_path(self.path), error)
                self._is_acknowledged = False
            else:
                self._is_acknowledged = True

    def _follow(self) -> None:
        while not self._ends.wait(_LOOK_EVERY_S):
            self.look()
