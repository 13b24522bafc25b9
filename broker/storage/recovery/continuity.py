"""The broker epoch since which this data directory has lost nothing, by which the cluster trusts its data or not.

The problem: acknowledged records are in the memory of every in-sync replica, not on its disk. A broker whose process
was killed comes back with all of them, since the kernel still has them. A broker whose host lost its power comes back
with less, and nothing in its files shows that a tail is missing. If it were elected, it would make the others cut off
acknowledged records.

The choice: the broker states the broker epoch (KIP-380: each registration has a new one) since which it has lost
nothing. That number is in a small file, with the boot id of the host. It stays the same over a clean stop, and over a
crash under the same boot id. Otherwise, and if recovery had to cut more than an incomplete last batch, it becomes "from
my next registration on". The registration carries it to the controller, which elects by it
(`controller/decisions/elections.py`).

A second number, `synced_since`, states the same for flushed records, for topics with durability=synced. Their replicas
count only for their flushed records, so a power cut takes nothing that they counted for, and the batches that it tears
belong to an unflushed tail. That number changes if more is missing: below the recovery point on file; in a log without
a power cut as the cause; with the directory, or with a disk that has failed.

Every interrupted step must err on the side of distrust:
- a loss is recorded before the recovery cuts anything, since the next recovery would find nothing to cut;
- the file has the present boot id before the clean-shutdown marker is removed, which is before any append: so under one
  start of the host it never vouches for records that were written under an earlier one;
- the epoch of the registration is in the file before this broker obeys any order under it.

With several directories (`log.dirs`) the broker as a whole is trusted or not, since a registration has room for one
number. Each directory is judged as above, and the least of them counts. They also vouch for each other: each has an id,
and the file names all directories that the broker had (`combined`). This shows whether one was taken out of `log.dirs`,
or an empty disk is mounted in its place; otherwise a trusted broker would make its replicas anew, empty. A directory
that fails while others go on is recorded in those, as its own disk may not take the record; and so is one that could
not be opened, for whatever reason, since a killed process may have left it more than it wrote. Not noticed: a broker
that has gone on with other directories, all of them gone by now, and gets back old ones or an old copy.

Rejected: a number for each partition (one more file to sync with each); a number for each directory (the controller
would have to know the directory of each replica before it elects); an fsync per append for all topics, which makes most
of this unnecessary and costs a disk's latency for each batch.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Sequence
from random import Random
from typing import Any, NamedTuple

import msgspec

from minibroker.broker.storage.checkpoints import MalformedFile, sealed, unsealed
from minibroker.protocol.world import Disk
from minibroker.protocol.znodes import SINCE_THIS_REGISTRATION

logger = logging.getLogger("minibroker.storage")

CONTINUITY_FILE = "data-continuity"

_VERSION = 0


class Continuity(msgspec.Struct, frozen=True, kw_only=True):
    """The contents of the file: under the host's start `boot_id`, everything written since the broker epoch
    `trusted_since` is there, and everything flushed since `synced_since` (None: as `trusted_since`).
    SINCE_THIS_REGISTRATION: nothing is certain before the next registration."""

    version: int = _VERSION
    boot_id: str
    trusted_since: int
    synced_since: int | None = None
    """None, `trusted_since`: written before there were synced topics."""
    directory_id: str = ""
    """The id of this directory, drawn when it was new. Empty, like the others, in files from before there could be
    several."""
    directories: tuple[str, ...] = ()
    """The ids of all directories of the broker."""
    failed: tuple[str, ...] = ()
    """Those among them that have failed since they were opened last."""


class Witness(NamedTuple):
    """A directory that was opened, as its file was before."""

    is_new: bool
    """There was nothing in it."""
    directory_id: str
    directories: tuple[str, ...]
    failed: tuple[str, ...]
    trusted_since: int
    synced_since: int


class Verdict(NamedTuple):
    """The verdict of all directories together."""

    trusted_since: int
    synced_since: int
    doubt: str
    """Why they are not believed, beside what each says of itself. Empty: there is nothing."""
    directories: tuple[str, ...]
    failed: tuple[str, ...]


def combined(witnesses: Sequence[Witness], unopened: int) -> Verdict:
    """Return the verdict on a broker that has opened these directories, at least one, and could not open `unopened`
    others. Those count as missing: meanwhile no replica that may be in them is made anew, and they are not trusted when
    they are back. A new directory beside all the others costs no trust. Pure."""
    present = {witness.directory_id for witness in witnesses}
    old = [witness for witness in witnesses if not witness.is_new]
    known = present.union(*(witness.directories for witness in old))
    missing = known - present
    failed = {directory for witness in old for directory in witness.failed}
    doubt = ""
    if len(missing) > unopened:
        doubt = "directories that this broker had are gone, or empty disks are in their place"
    elif present & failed:
        doubt = "a directory that failed is back: its disk may have lost what was in memory"
    elif any(other.directory_id not in (w.directories or (w.directory_id,)) for w in old for other in old):
        doubt = "a directory is back without which the broker had gone on"
    directories = known if unopened else present
    if unopened:
        failed |= missing
    return Verdict(
        trusted_since=SINCE_THIS_REGISTRATION if doubt else least_of(w.trusted_since for w in old),
        synced_since=SINCE_THIS_REGISTRATION if doubt else least_of(w.synced_since for w in old),
        doubt=doubt,
        directories=tuple(sorted(directories)),
        failed=tuple(sorted((failed & directories) - present)),
    )


def least_of(words: Iterable[int]) -> int:
    """Since which broker epoch nothing was lost, of several directories' words for it; SINCE_THIS_REGISTRATION where
    there is none."""
    found = list(words)
    return SINCE_THIS_REGISTRATION if SINCE_THIS_REGISTRATION in found or not found else max(found)


def _synced_since(content: Continuity) -> int:
    return content.trusted_since if content.synced_since is None else content.synced_since


def encode_continuity(continuity: Continuity) -> bytes:
    return sealed(msgspec.json.encode(continuity))


def decode_continuity(path: str, data: bytes) -> Continuity:
    """Raises MalformedFile."""
    try:
        found = msgspec.json.decode(unsealed(path, data), type=Continuity)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MalformedFile(f"{path} is damaged: {error}") from error
    if found.version != _VERSION or min(found.trusted_since, _synced_since(found)) < SINCE_THIS_REGISTRATION:
        raise MalformedFile(
            f"{path} is damaged: version {found.version}, trusted since {found.trusted_since}, synced since "
            f"{found.synced_since}"
        )
    return msgspec.structs.replace(found, synced_since=_synced_since(found))


class DataContinuity:
    """One data directory's. Calls block for the write of a small file; what they change is durable when they return.
    They raise OSError."""

    def __init__(self, disk: Disk, log_dir: str, random: Random) -> None:
        self._disk = disk
        self._path = f"{log_dir}/{CONTINUITY_FILE}"
        self._random = random
        self._content = Continuity(boot_id="", trusted_since=SINCE_THIS_REGISTRATION)
        self._is_new = True
        self._writing = threading.Lock()

    @property
    def trusted_since(self) -> int:
        """For the registration: a broker epoch, or SINCE_THIS_REGISTRATION."""
        return self._content.trusted_since

    @property
    def synced_since(self) -> int:
        """The broker epoch since which nothing flushed was lost."""
        return _synced_since(self._content)

    @property
    def directory_id(self) -> str:
        return self._content.directory_id

    def begin(self, *, was_clean: bool, is_new: bool = False) -> None:
        """Begin, before the marker of the clean stop is removed and before any log is opened. `is_new`: the directory
        had no owner before."""
        boot_id = self._present_boot_id()
        found = self._read()
        self._is_new = is_new and found is None
        trusted_since = SINCE_THIS_REGISTRATION
        if found is not None and (was_clean or (boot_id and found.boot_id == boot_id)):
            trusted_since = found.trusted_since
        elif found is not None:
            logger.warning(
                "the host was started anew, and the broker had not stopped cleanly before: its last writes may be "
                "missing, so only topics with durability=synced may elect it before it has caught up"
            )
        before = found or self._content
        begun = msgspec.structs.replace(
            before,
            boot_id=boot_id,
            trusted_since=trusted_since,
            synced_since=_synced_since(before),
            directory_id=before.directory_id or f"{self._random.getrandbits(128):032x}",
        )
        if begun == found:
            self._content = found
        else:
            self._write(begun)

    @property
    def has_lost_memory(self) -> bool:
        """Whether, after `begin`, records that were written and not flushed may be gone."""
        return self.trusted_since == SINCE_THIS_REGISTRATION

    def witness(self) -> Witness:
        """After `begin`, and after the logs were opened."""
        content = self._content
        return Witness(
            self._is_new,
            content.directory_id,
            content.directories,
            content.failed,
            self.trusted_since,
            self.synced_since,
        )

    def agree(self, verdict: Verdict) -> None:
        """Write down what all directories say together. Before the registration."""
        with self._writing:
            trusted_since, synced_since = self.trusted_since, self.synced_since
            if verdict.doubt or self._is_new:
                trusted_since, synced_since = verdict.trusted_since, verdict.synced_since
            self._change(
                trusted_since=trusted_since,
                synced_since=synced_since,
                directories=verdict.directories,
                failed=verdict.failed,
            )

    def note_failed(self, directories: Collection[str]) -> None:
        """Other directories of this broker have failed, which goes on without them. Called from any thread."""
        with self._writing:
            self._change(failed=tuple(sorted({*self._content.failed, *directories})))

    def distrust(self, reason: str, was_flushed: bool = True) -> None:
        """Record a loss that has happened or is about to. Called from any thread. Without `was_flushed` the loss may be
        an unflushed tail; it counts as one if the memory of the last run is known to be gone. (That stays known,
        however often the start is interrupted, until all logs are open.)"""
        with self._writing:
            if self.trusted_since == SINCE_THIS_REGISTRATION and not was_flushed:
                return
            if self.trusted_since == self.synced_since == SINCE_THIS_REGISTRATION:
                return
            logger.warning("what the data directory held is incomplete: %s", reason)
            self._change(trusted_since=SINCE_THIS_REGISTRATION, synced_since=SINCE_THIS_REGISTRATION)

    def registered(self, broker_epoch: int) -> None:
        """Take the broker's new epoch. From now on its writes are vouched for since this epoch."""
        with self._writing:
            # Epochs only grow, except with a ZooKeeper that was set up anew, in which nothing is on record yet.
            known = self.trusted_since, self.synced_since
            trusted, synced = (broker_epoch if s == SINCE_THIS_REGISTRATION or broker_epoch < s else s for s in known)
            self._change(trusted_since=trusted, synced_since=synced)

    def _change(self, **fields: Any) -> None:
        content = msgspec.structs.replace(self._content, **fields)
        if content != self._content:
            self._write(content)

    def _write(self, content: Continuity) -> None:
        self._disk.write_atomically(self._path, encode_continuity(content))
        self._content = content

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
