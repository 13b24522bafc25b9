"""Cut the power of real brokers under load, round after round; check that no acknowledged record is lost.

    python -m tests.faults.power_cuts --one 60 --all 15

Each broker has its own ext4 file system, in a file. A cut freezes the broker, shuts its file system down without
writing its journal (FS_IOC_SHUTDOWN), and kills the broker. The next start mounts the file as the cut left it, under
another boot id. Two files in the directory prove that it was a cut: the synced one must be complete, the unsynced one
empty. Each broker mounts its file system in its own mount namespace, so the host's mounts do not change, and the mount
disappears with the process.

First one broker at a time loses its power, the next one when all replicas are in sync again; then all brokers at once.
A producer writes throughout with acks=all to one topic with `durability=replicated` and one with `synced`. After each
cut all replicas must return to the ISR without help, and all records are read back. Each acknowledged record must be
there. The replicated topic may lose records when all brokers lose their power; those are counted. (Bytes that ext4 has
handed to the file count as written: the loss of a disk's cache is not simulated.)

Needs root. Exit code 1 if a record was lost that must survive.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import itertools
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from random import Random
from typing import NamedTuple

from minibroker.client.admin import Admin
from minibroker.deploy.local import secret_file, zookeeper
from minibroker.deploy.local.plan import ZOOKEEPER_PROTECTION
from minibroker.deploy.local.ports import LOOPBACK, free_ports
from minibroker.deploy.local.processes import let_signals_interrupt, send_signal, wait_until, wait_until_gone
from minibroker.deploy.observing.cluster_view import ask_cluster
from minibroker.deploy.trials.trial import Trial, TrialVerdict
from minibroker.protocol.model import INTERNAL_TOPICS

BROKERS = (1, 2, 3)
PARTITIONS = 3
RECORDS_PER_SECOND = 300
RECORD_BYTES = 200
DISK_BYTES = 512 * 1024 * 1024
WHOLE_WITHIN_S = 90.0
_FS_IOC_SHUTDOWN = 0x8004587D
_WITHOUT_JOURNAL = 2
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_START = """
set -e
mount --bind "$1" "$2"
mount -o loop "$3" "$4"
shift 4
exec "$@"
"""
"""The shell script that prepares the namespace and then becomes the broker's process."""


class PowerCutFailed(Exception):
    """The cluster did not recover, or power cuts are impossible on this machine."""


class MachineBroker:
    """A broker with a disk that can lose its power."""

    def __init__(
        self, directory: Path, broker_id: int, port: int, zookeeper_port: int, secret: Path, digest: Path
    ) -> None:
        self.id = broker_id
        self.port = port
        self.log = directory / f"broker-{broker_id}.log"
        self._image = directory / f"disk-{broker_id}.img"
        self._mount_point = directory / f"disk-{broker_id}"
        self._mount_point.mkdir()
        self._boot_id = directory / f"boot-id-{broker_id}"
        self._settings = {
            "broker.id": str(broker_id),
            "listeners": f"PLAINTEXT://{LOOPBACK}:{port},CONTROLLER://{LOOPBACK}:0",
            "control.plane.listener.name": "CONTROLLER",
            "log.dirs": str(self._mount_point / "data"),
            "zookeeper.connect": f"{LOOPBACK}:{zookeeper_port}",
            "broker.secret.file": str(secret),
            **ZOOKEEPER_PROTECTION,
            "zookeeper.digest.file": str(digest),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._cuts = 0
        with self._image.open("wb") as image:
            image.truncate(DISK_BYTES)
        _run("mkfs.ext4", "-q", "-F", str(self._image))

    def start(self) -> None:
        """Start the process without waiting for it. After a cut the broker finds the boot id of a restarted host."""
        self._boot_id.write_text(f"{uuid.uuid4()}\n", encoding="ascii")
        overrides = [text for pair in self._settings.items() for text in ("--override", "=".join(pair))]
        broker = [sys.executable, "-P", "-u", "-m", "minibroker.broker", *overrides]
        places = [str(self._boot_id), _BOOT_ID, str(self._image), str(self._mount_point)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                # The broker dies with this process, however this process ends.
                ["setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "sh", "-c", _START, "sh", *places, *broker],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def has_ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def freeze(self) -> None:
        """Stop all threads of the broker; return when all have stopped."""
        assert self._process is not None
        pid = self._process.pid
        os.kill(pid, signal.SIGSTOP)
        if not wait_until(lambda: all(_state(task) == "T" for task in Path(f"/proc/{pid}/task").iterdir()), 10):
            raise PowerCutFailed(f"broker {self.id} did not freeze within 10 s")

    def cut(self) -> None:
        """Cut the power of a frozen broker. On return its disk holds only the bytes already written."""
        assert self._process is not None
        self._cuts += 1
        root = Path(f"/proc/{self._process.pid}/root{self._mount_point}")
        for name, is_synced in (("synced", True), ("unsynced", False)):
            with (root / name).open("wb") as file:
                file.write(b"%d" % self._cuts * 1_000)
                file.flush()
                if is_synced:
                    os.fsync(file.fileno())
        descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, _FS_IOC_SHUTDOWN, struct.pack("I", _WITHOUT_JOURNAL))
        finally:
            os.close(descriptor)
        self.end()

    def end(self) -> None:
        """Kill the broker; its file system is unmounted on return."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait()
        if not wait_until(lambda: not _run("losetup", "--associated", str(self._image)), 20):
            raise PowerCutFailed(f"the disk of broker {self.id} is still mounted")

    def check_cut(self) -> None:
        """Check, after the restart, that exactly the synced file survived the cut."""
        assert self._process is not None
        root = Path(f"/proc/{self._process.pid}/root{self._mount_point}")
        expected = b"%d" % self._cuts * 1_000
        if (root / "synced").read_bytes() != expected:
            raise PowerCutFailed(f"the disk of broker {self.id} lost synced bytes")
        unsynced = root / "unsynced"
        if unsynced.exists() and unsynced.read_bytes() == expected:
            raise PowerCutFailed(f"the disk of broker {self.id} kept unsynced bytes: that was no power cut")
        if self.log.read_text(errors="replace").count("the host was started anew") < self._cuts:
            raise PowerCutFailed(f"broker {self.id} did not notice the restart of its host: see {self.log}")


class Round(NamedTuple):
    cut: Sequence[int]
    whole_after_s: float
    verdicts: dict[str, TrialVerdict]


class Rounds:
    """The cluster and its load."""

    def __init__(self, brokers: Sequence[MachineBroker], seed: int) -> None:
        self._brokers = brokers
        self._random = Random(seed)
        bootstrap = ",".join(f"{LOOPBACK}:{broker.port}" for broker in brokers)
        self._admin = Admin(bootstrap)
        self._trials = {
            durability: Trial(
                bootstrap, durability, PARTITIONS, _values(self._random), records_per_second=RECORDS_PER_SECOND
            )
            for durability in ("replicated", "synced")
        }

    async def begin(self) -> None:
        for broker in self._brokers:
            broker.start()
        await self._until_whole(topics=0)
        async with self._admin as admin:
            for durability in self._trials:
                await admin.create_topic(
                    durability, partitions=PARTITIONS, replication_factor=3, configs={"durability": durability}
                )

    async def play(self, cut: Sequence[MachineBroker]) -> Round:
        async with AsyncExitStack() as load:
            for trial in self._trials.values():
                await load.enter_async_context(trial.sending())
            await self._acknowledged(100)
            await asyncio.sleep(self._random.uniform(0, 1))
            began_s = time.monotonic()
            for broker in cut:
                broker.freeze()
            for broker in cut:
                broker.cut()
            if len(cut) == 1:
                await self._acknowledged(20)
            for broker in cut:
                broker.start()
            await self._until_whole()
            whole_after_s = time.monotonic() - began_s
            await self._acknowledged(20)
        for broker in cut:
            broker.check_cut()
        async with asyncio.timeout(WHOLE_WITHIN_S):
            verdicts = {durability: await trial.verdict() for durability, trial in self._trials.items()}
        return Round([broker.id for broker in cut], whole_after_s, verdicts)

    async def _acknowledged(self, more: int) -> None:
        """Wait until every partition has acknowledged this many more records."""
        try:
            await asyncio.gather(
                *(trial.wait_for_acknowledgements(more, WHOLE_WITHIN_S) for trial in self._trials.values())
            )
        except TimeoutError as error:
            raise PowerCutFailed(f"not every partition accepts records within {WHOLE_WITHIN_S:g} s") from error

    async def _until_whole(self, topics: int = 2) -> None:
        addresses = [(LOOPBACK, broker.port) for broker in self._brokers]
        deadline = time.monotonic() + WHOLE_WITHIN_S
        while True:
            view = await ask_cluster(addresses)
            states = list(view.partitions.values())
            own = [partition for partition in view.partitions if partition.topic not in INTERNAL_TOPICS]
            if (
                sorted(view.brokers) == [broker.id for broker in self._brokers]
                and view.controller_id is not None
                and len(own) == topics * PARTITIONS
                and all(len(state.isr_nodes) == len(self._brokers) for state in states)
            ):
                return
            for broker in self._brokers:
                if broker.has_ended:
                    last = "\n".join(broker.log.read_text(errors="replace").splitlines()[-10:])
                    raise PowerCutFailed(f"broker {broker.id} has ended:\n{last}")
            if time.monotonic() > deadline:
                raise PowerCutFailed(f"not every replica is in sync within {WHOLE_WITHIN_S:g} s: {view}")
            await asyncio.sleep(0.05)


def _values(random: Random) -> Iterator[bytes]:
    return (random.randbytes(RECORD_BYTES) for _ in itertools.count())


def _state(task: Path) -> str:
    """The state of a thread, one letter as in proc(5)."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    return "T"  # it has ended


def _run(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise PowerCutFailed(f"{command[0]} is missing") from error
    if done.returncode != 0:
        raise PowerCutFailed(
            f"power cuts need root, and the right to mount: {' '.join(command)}: {done.stderr.strip()}"
        )
    return done.stdout.strip()


class Count(NamedTuple):
    """The totals of all rounds of one kind."""

    rounds: int
    acknowledged: int
    lost: int
    wrong: int
    """Duplicated, out of order or altered."""
    worst_s: float


def _table(counts: dict[tuple[str, str], Count]) -> str:
    lines = [
        f"{'power cut':12}{'topic':12}{'rounds':>8}{'acknowledged':>14}{'lost':>8}{'wrong':>7}{'worst recovery':>16}"
    ]
    for (cut, durability), count in counts.items():
        lines.append(
            f"{cut:12}{durability:12}{count.rounds:8}{count.acknowledged:14}{count.lost:8}{count.wrong:7}"
            f"{count.worst_s:14.1f} s"
        )
    return "\n".join(lines)


async def play(brokers: Sequence[MachineBroker], one: int, all_: int, seed: int) -> int:
    """Play the rounds and print the table, even after a failure. Return how many kinds of cut lost records that must
    survive."""
    rounds = Rounds(brokers, seed)
    counts: dict[tuple[str, str], Count] = {}
    before = dict.fromkeys(("replicated", "synced"), (0, 0, 0))
    plan = [("one broker", [brokers[number % len(brokers)]]) for number in range(one)]
    plan += [("all brokers", list(brokers))] * all_
    try:
        await rounds.begin()
        for number, (kind, cut) in enumerate(plan, 1):
            played = await rounds.play(cut)
            told = []
            for durability, verdict in played.verdicts.items():
                now = (
                    verdict.acknowledged,
                    verdict.lost,
                    verdict.duplicated + verdict.out_of_order + verdict.altered,
                )
                acknowledged, lost, wrong = (n - b for n, b in zip(now, before[durability], strict=True))
                before[durability] = now
                sum_ = counts.get((kind, durability), Count(0, 0, 0, 0, 0))
                counts[kind, durability] = Count(
                    sum_.rounds + 1,
                    sum_.acknowledged + acknowledged,
                    sum_.lost + lost,
                    sum_.wrong + wrong,
                    max(sum_.worst_s, played.whole_after_s),
                )
                told.append(f"{durability}: {acknowledged} acknowledged, {lost} lost, {wrong} wrong")
            told.append(f"whole after {played.whole_after_s:.1f} s")
            print(f"{number}/{len(plan)} cut {played.cut}; " + "; ".join(told), file=sys.stderr, flush=True)
    finally:
        print(_table(counts), flush=True)
    return sum(
        (count.lost > 0 or count.wrong > 0) and (kind, durability) != ("all brokers", "replicated")
        for (kind, durability), count in counts.items()
    )


def cut_power(directory: Path, one: int, all_: int, seed: int) -> int:
    """Play in an existing directory that no other process uses."""
    _run("unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", str(directory))
    zookeeper_port, *ports = free_ports(1 + len(BROKERS))
    secret = directory / secret_file.FILE_NAME
    digest = directory / secret_file.DIGEST_FILE_NAME
    secret_file.make(secret)
    secret_file.make(digest)
    with ExitStack() as ending:
        log = directory / "zookeeper.log"
        server = zookeeper.start(zookeeper.find_program(), directory / "zookeeper", log, zookeeper_port)
        ending.callback(wait_until_gone, [server], 20)
        ending.callback(send_signal, server, signal.SIGKILL)
        zookeeper.wait_until_serving(server, zookeeper_port, log)
        brokers = []
        for broker_id, port in zip(BROKERS, ports, strict=True):
            brokers.append(MachineBroker(directory, broker_id, port, zookeeper_port, secret, digest))
            ending.callback(brokers[-1].end)
        return asyncio.run(play(brokers, one, all_, seed))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", type=int, default=1, metavar="ROUNDS", help="how often one broker loses its power")
    parser.add_argument("--all", type=int, default=1, metavar="ROUNDS", help="how often all brokers lose it at once")
    parser.add_argument("--seed", type=int, default=1, help="of the times at which the power is cut")
    parser.add_argument("--keep", type=Path, help="use this directory, which is made, and leave it")
    arguments = parser.parse_args()
    let_signals_interrupt()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="minibroker-power-") as temporary:
        directory = arguments.keep.absolute() if arguments.keep else Path(temporary)
        directory.mkdir(parents=True, exist_ok=True)
        try:
            bad = cut_power(directory, arguments.one, arguments.all, arguments.seed)
        except PowerCutFailed as error:
            print(f"power_cuts: {error}", file=sys.stderr)
            sys.exit(1)
    print(f"power_cuts: {'passed' if not bad else 'failed'}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
