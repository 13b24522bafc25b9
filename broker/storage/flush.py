"""What one flush of a log writes: a picture of what is not on disk yet."""

from dataclasses import dataclass, field

from minibroker.broker.storage.checkpoints import LEADER_EPOCH_FILE, PARTITION_METADATA_FILE, encode_topic_id
from minibroker.broker.storage.producer_state import Producer
from minibroker.broker.storage.segment import IndexWrite, Segment
from minibroker.broker.storage.snapshots import remove_snapshot, write_snapshot
from minibroker.protocol.world import Disk, File, World


@dataclass
class Flush:
    """Made in the event loop, of the log as it is then; carried out in a worker thread."""

    end_offset: int
    changes: int
    epochs_version: int
    directory: str
    files: list[File] = field(default_factory=list)
    indexes: list[IndexWrite] = field(default_factory=list)
    sealed: list[Segment] = field(default_factory=list)
    sync_directory: bool = False
    topic_id: str = ""
    """Where the file that has it is not known to be on disk."""
    epochs: bytes | None = None
    snapshots: list[tuple[int, list[tuple[int, Producer]]]] = field(default_factory=list)
    old_snapshots: list[int] = field(default_factory=list)
    lowest_cut: int | None = None
    """Where the log was truncated meanwhile."""

    def carry_out(self, world: World) -> None:
        """Blocks. Raises OSError; then nothing is known about what was written."""
        disk = world.disk
        for file in self.files:
            file.fdatasync()
        for index in self.indexes:
            index.carry_out(disk)
        for offset, captured in self.snapshots:
            write_snapshot(disk, self.directory, offset, captured)
        for offset in self.old_snapshots:
            remove_snapshot(disk, self.directory, offset)
        if self.topic_id:
            write_topic_id(disk, self.directory, self.topic_id)
        if self.epochs is not None:
            disk.write_atomically(f"{self.directory}/{LEADER_EPOCH_FILE}", self.epochs)  # syncs the directory
        elif self.sync_directory and not self.topic_id:
            disk.sync_directory(self.directory)


def write_topic_id(disk: Disk, directory: str, topic_id: str) -> None:
    """Durable on return, with the other names in the log's directory. Raises OSError."""
    disk.write_atomically(f"{directory}/{PARTITION_METADATA_FILE}", encode_topic_id(topic_id))
