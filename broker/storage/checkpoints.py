"""The small files beside the segments, in Kafka's formats, and the rules for writing them.

Unlike in Kafka, each file ends with a line that has a checksum of the lines before it. Without it a flipped digit of a
log start offset or leader epoch, or a flipped letter of a topic id, would go unnoticed: records would be hidden, cut
off, or deleted as those of another topic. Files without that line are read as well: they were written before it
existed.

Encoding and decoding are pure functions. `OffsetCheckpoint` is the one file per directory that holds an offset for
every partition (recovery points, log start offsets, high watermarks, first dirty offsets).

A recovery point on disk is a promise: "below it, everything is there". So it must never stay higher than a truncation
left it, and worker threads that write an older picture must not overwrite a newer one. Hence `values`, an upper bound
on what the file can say while writes are under way, and `lower`, which returns once the file says less.
"""

import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
from crc32c import crc32c

from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import Disk

RECOVERY_POINT_FILE = "recovery-point-offset-checkpoint"
LOG_START_OFFSET_FILE = "log-start-offset-checkpoint"
HIGH_WATERMARK_FILE = "replication-offset-checkpoint"
CLEANER_OFFSET_FILE = "cleaner-offset-checkpoint"
LEADER_EPOCH_FILE = "leader-epoch-checkpoint"
PARTITION_METADATA_FILE = "partition.metadata"
META_PROPERTIES_FILE = "meta.properties"
CLEAN_SHUTDOWN_FILE = ".kafka_cleanshutdown"
LOCK_FILE = ".lock"

_VERSION = 0
_SEAL = b"# crc32c "


class MalformedFile(MinibrokerError, ValueError):
    """A file of the data directory does not hold what it should. Names the file and what was found."""


class EpochEntry(NamedTuple):
    epoch: int
    start_offset: int


class MetaProperties(NamedTuple):
    """Whose data directory it is."""

    broker_id: int
    cluster_id: str


class CleanShutdown(msgspec.Struct, frozen=True, rename={"broker_epoch": "brokerEpoch"}):
    """The marker of a clean stop (Kafka's CleanShutdownFileHandler). `broker_epoch` -1: not known."""

    version: int = _VERSION
    broker_epoch: int = -1


def sealed(content: bytes) -> bytes:
    """A small file with its checksum."""
    return content + _seal(content)


def _seal(content: bytes) -> bytes:
    return b"%s%08x\n" % (_SEAL, crc32c(content))


def unsealed(path: str, data: bytes) -> bytes:
    """Return the text before the checksum, if there is one. Raises MalformedFile if the checksum does not match."""
    content, mark, _ = data.rpartition(_SEAL)
    if not mark:
        return data
    if data[len(content) :] != _seal(content):
        raise MalformedFile(f"{path} is damaged: its checksum is not that of what stands before it")
    return content


def _encode_lines(lines: Sequence[str]) -> bytes:
    return sealed("\n".join((str(_VERSION), str(len(lines)), *lines, "")).encode())


def _decode_lines(path: str, data: bytes) -> list[str]:
    try:
        version, count, *lines = unsealed(path, data).decode().splitlines()
        if int(version) != _VERSION or int(count) != len(lines):
            raise ValueError(f"version {version}, {count} lines announced, {len(lines)} found")
    except MalformedFile:  # a ValueError as well
        raise
    except ValueError as error:
        raise MalformedFile(f"{path} is damaged: {error}") from error
    return lines


def encode_offsets(offsets: Mapping[TopicPartition, int]) -> bytes:
    return _encode_lines([f"{topic} {partition} {offset}" for (topic, partition), offset in sorted(offsets.items())])


def decode_offsets(path: str, data: bytes) -> dict[TopicPartition, int]:
    """Raises MalformedFile."""
    offsets: dict[TopicPartition, int] = {}
    for line in _decode_lines(path, data):
        try:
            topic, partition, offset = line.split(" ")
            offsets[TopicPartition(topic, int(partition))] = int(offset)
        except ValueError as error:
            raise MalformedFile(f"{path} is damaged: {line[:300]!r} is not 'topic partition offset'") from error
    return offsets


def encode_epochs(entries: Sequence[EpochEntry]) -> bytes:
    return _encode_lines([f"{epoch} {start_offset}" for epoch, start_offset in entries])


def decode_epochs(path: str, data: bytes) -> list[EpochEntry]:
    """Entries with epoch and start offset increasing. Raises MalformedFile."""
    entries: list[EpochEntry] = []
    last = EpochEntry(-1, -1)
    for line in _decode_lines(path, data):
        try:
            epoch, start_offset = map(int, line.split(" "))
        except ValueError as error:
            raise MalformedFile(f"{path} is damaged: {line[:100]!r} is not 'epoch offset'") from error
        if epoch <= last.epoch or start_offset <= last.start_offset:
            raise MalformedFile(f"{path} is damaged: {line!r} follows '{last.epoch} {last.start_offset}'")
        last = EpochEntry(epoch, start_offset)
        entries.append(last)
    return entries


def encode_topic_id(topic_id: str) -> bytes:
    return sealed(f"version: {_VERSION}\ntopic_id: {topic_id}\n".encode())


def decode_topic_id(path: str, data: bytes) -> str:
    """Raises MalformedFile."""
    fields = _decode_properties(path, data, ":")
    if fields.get("version") != str(_VERSION) or not fields.get("topic_id"):
        raise MalformedFile(f"{path} is damaged: 'version: {_VERSION}' and 'topic_id: ID' are expected")
    return fields["topic_id"]


def encode_meta_properties(meta: MetaProperties) -> bytes:
    return sealed(f"version=0\nbroker.id={meta.broker_id}\ncluster.id={meta.cluster_id}\n".encode())


def decode_meta_properties(path: str, data: bytes) -> MetaProperties:
    """Raises MalformedFile."""
    fields = _decode_properties(path, data, "=")
    try:
        return MetaProperties(int(fields["broker.id"]), fields["cluster.id"])
    except (KeyError, ValueError) as error:
        raise MalformedFile(f"{path} is damaged: broker.id=NUMBER and cluster.id=ID are expected") from error


def encode_clean_shutdown(broker_epoch: int) -> bytes:
    return sealed(msgspec.json.encode(CleanShutdown(broker_epoch=broker_epoch)))


def decode_clean_shutdown(path: str, data: bytes) -> int:
    """The broker epoch. Raises MalformedFile."""
    try:
        return msgspec.json.decode(unsealed(path, data), type=CleanShutdown).broker_epoch
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedFile(f"{path} is damaged: {error}") from error


def _decode_properties(path: str, data: bytes, separator: str) -> dict[str, str]:
    try:
        text = unsealed(path, data).decode()
    except UnicodeDecodeError as error:
        raise MalformedFile(f"{path} is damaged: {error}") from error
    fields: dict[str, str] = {}
    for line in text.splitlines():
        if line.strip() and line[0] not in "#!":
            name, _, value = line.partition(separator)
            fields[name.strip()] = value.strip()
    return fields


Staged = tuple[int, dict[TopicPartition, int]]


class OffsetCheckpoint:
    """One file with an offset per partition. Calls block; they may come from any thread."""

    def __init__(self, disk: Disk, path: str) -> None:
        self.path = path
        self.values: dict[TopicPartition, int] = {}
        """The offsets that the file holds, or will hold once every write has ended."""
        self.stored: Mapping[TopicPartition, int] = {}
        """The offsets that the file holds, durably."""
        self._disk = disk
        self._staging = threading.Lock()
        self._writing = threading.Lock()
        self._staged = 0
        self._written = 0

    def read(self) -> dict[TopicPartition, int]:
        """Empty where there is no file. Raises MalformedFile."""
        if self._disk.exists(self.path):
            self.values = self.stored = decode_offsets(self.path, self._disk.read_file(self.path))
        return dict(self.values)

    @property
    def is_written(self) -> bool:
        """The file says what `values` says, durably."""
        return self._written == self._staged

    def stage(self, values: Mapping[TopicPartition, int]) -> Staged:
        """Take a picture, to be written by `write` in this thread or another. Does not block."""
        with self._staging:
            return self._stage(values)

    def _stage(self, values: Mapping[TopicPartition, int]) -> Staged:
        self._staged += 1
        self.values = dict(values)
        return self._staged, self.values

    def write(self, staged: Staged) -> None:
        """Durable on return, unless a newer picture is. Raises OSError."""
        number, values = staged
        with self._writing:
            if number > self._written:
                self._disk.write_atomically(self.path, encode_offsets(values))
                self._written, self.stored = number, values

    def write_staged(self) -> None:
        """The latest picture is on disk on return. Raises OSError."""
        with self._staging:
            staged = self._staged, self.values
        self.write(staged)

    def lower(self, partition: TopicPartition, offset: int) -> None:
        """On return the file says no more than `offset`. Costs nothing where it does not say more, unless a picture is
        on its way: the file may still say what the picture does not. Raises OSError."""
        with self._staging:
            if self.values.get(partition, 0) > offset:
                self._stage({**self.values, partition: offset})
            elif self._written == self._staged:
                return
            staged = self._staged, self.values
        self.write(staged)
