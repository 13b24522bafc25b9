"""Since when this data directory has lost nothing: the broker's word on whether its data can be believed.

The problem: what is acknowledged is in the memory of every in-sync replica, not on its disk. A broker whose process
was killed comes back with all of it, since the kernel still has it; a broker whose host lost its power comes back with
less, and nothing in its files shows that a tail is missing. Elected all the same, it would make the others cut off what
was acknowledged.

The choice: the broker says of itself since which broker epoch (KIP-380: each registration has a new one) it has lost
nothing. That number is kept in a small file, together with the boot id of the host. It stays the same over a clean
stop, and over a crash under the same boot id; otherwise, and wherever recovery had to cut more than an incomplete last
batch, it becomes "from my next registration on". The registration carries it to the controller, which elects by it
(`controller/decisions/elections.py`).

A second number, `synced_since`, says the same of what had been flushed, for topics with durability=synced: their
replicas count for what is on disk alone, so a power cut takes nothing from them that they stood for, and the batches
that it tore are those of an unflushed tail. That number changes where more is missing: below the recovery point on
file; in a log that no power cut explains; with the directory, or with a disk that has failed.

Whatever is interrupted must err on the side of distrust:
- a loss is written down before the recovery cuts anything, since the next recovery would find nothing to cut;
- the file has the present boot id before the clean-shutdown marker is removed, which is before anything is appended:
  so it never vouches, under one start of the host, for what was written under an earlier one;
- the epoch of the registration is in the file before this broker obeys any order under it.

Rejected: a word for each partition (one more file to sync with each); an fsync per append for all topics, which makes
most of this unnecessary and costs a disk's latency for each batch.
"""

from __future__ import annotations

import logging
import threading

import msgspec

from minibroker.broker.storage.checkpoints import MalformedFile, sealed, unsealed
from minibroker.protocol.world import Disk
from minibroker.protocol.znodes import SINCE_THIS_REGISTRATION

logger = logging.getLogger("minibroker.storage")

CONTINUITY_FILE = "data-continuity"

_VERSION = 0


class Continuity(msgspec.Struct, frozen=True, kw_only=True):
    """What the file says: under the host's start `boot_id`, all that was written since the broker epoch `trusted_since`
    is there, and all that was flushed since `synced_since` (None: as `trusted_since`). SINCE_THIS_REGISTRATION: nothing
    is sure before the next registration."""

    version: int = _VERSION
    boot_id: str
    trusted_since: int
    synced_since: int | None = None


def encode_continuity(continuity: Continuity) -> bytes:
    return sealed(msgspec.json.encode(continuity))


def decode_continuity(path: str, data: bytes) -> Continuity:
    """Raises MalformedFile."""
    try:
        found = msgspec.json.decode(unsealed(path, data), type=Continuity)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MalformedFile(f"{path} is damaged: {error}") from error
    if found.synced_since is None:
        found = msgspec.structs.replace(found, synced_since=found.trusted_since)
    if found.version != _VERSION or min(found.trusted_since, found.synced_since or 0) < SINCE_THIS_REGISTRATION:
        raise MalformedFile(
            f"{path} is damaged: version {found.version}, trusted since {found.trusted_since}, synced since "
            f"{found.synced_since}"
        )
    return found


class DataContinuity:
    """One data directory's. Calls block for the write of a small file; what they change is durable when they return.
    They raise OSError."""

    def __init__(self, disk: Disk, log_dir: str) -> None:
        self._disk = disk
        self._path = f"{log_dir}/{CONTINUITY_FILE}"
        self._boot_id = ""
        self._trusted_since = SINCE_THIS_REGISTRATION
        self._synced_since = SINCE_THIS_REGISTRATION
        self._writing = threading.Lock()

    @property
    def trusted_since(self) -> int:
        """For the registration: a broker epoch, or SINCE_THIS_REGISTRATION."""
        return self._trusted_since

    @property
    def synced_since(self) -> int:
        """The same of what had been flushed."""
        return self._synced_since

    def begin(self, *, was_clean: bool) -> None:
        """First of all, before the marker of the clean stop is removed and before any log is opened."""
        self._boot_id = self._present_boot_id()
        found = self._read()
        trusted_since = synced_since = SINCE_THIS_REGISTRATION
        if found is not None and found.synced_since is not None:
            synced_since = found.synced_since
        if found is not None and (was_clean or (self._boot_id and found.boot_id == self._boot_id)):
            trusted_since = found.trusted_since
        elif found is not None:
            logger.warning(
                "the host was started anew, and the broker had not stopped cleanly before: what it wrote last may be "
                "missing, so it is not elected for what it had (but where a topic's durability is synced)"
            )
        if found == Continuity(boot_id=self._boot_id, trusted_since=trusted_since, synced_since=synced_since):
            self._trusted_since, self._synced_since = trusted_since, synced_since
        else:
            self._write(trusted_since, synced_since)

    def distrust(self, reason: str, was_flushed: bool = True) -> None:
        """Something is lost, or is about to be. Called from any thread.

        Without `was_flushed` it may be the tail that nobody had flushed: it is, where what was in memory is known to be
        gone. (That stays known, however often the start is interrupted, until all logs are open.)"""
        with self._writing:
            if self._trusted_since == SINCE_THIS_REGISTRATION and not was_flushed:
                return
            if self._trusted_since == self._synced_since == SINCE_THIS_REGISTRATION:
                return
            logger.warning("what the data directory held is incomplete: %s", reason)
            self._write(SINCE_THIS_REGISTRATION, SINCE_THIS_REGISTRATION)

    def registered(self, broker_epoch: int) -> None:
        """This broker has this epoch. What it writes from now on is there until it says otherwise."""
        with self._writing:
            # Epochs only grow, except with a ZooKeeper that was set up anew, in which nothing is on record yet.
            known = self._trusted_since, self._synced_since
            now = [broker_epoch if s == SINCE_THIS_REGISTRATION or broker_epoch < s else s for s in known]
            if tuple(now) != known:
                self._write(*now)

    def _write(self, trusted_since: int, synced_since: int) -> None:
        content = Continuity(boot_id=self._boot_id, trusted_since=trusted_since, synced_since=synced_since)
        self._disk.write_atomically(self._path, encode_continuity(content))
        self._trusted_since, self._synced_since = trusted_since, synced_since

    def _read(self) -> Continuity | None:
        if not self._disk.exists(self._path):
            return None
        try:
            return decode_continuity(self._path, self._disk.read_file(self._path))
        except MalformedFile as error:
            logger.warning("%s; going on without it", error)
            return None

    def _present_boot_id(self) -> str:
        try:
            return self._disk.boot_id()
        except FileNotFoundError:
            return ""  # an operating system that has none: then only a clean stop is believed
