"""`minibroker log`: the files of a stopped broker's data directory.

This is the only module outside the broker that knows the format of its logs. It uses the broker's own readers, since a
second reader would have to be kept in step.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from minibroker.broker.storage.checkpoints import (
    CLEAN_SHUTDOWN_FILE,
    CLEANER_OFFSET_FILE,
    HIGH_WATERMARK_FILE,
    LEADER_EPOCH_FILE,
    LOG_START_OFFSET_FILE,
    META_PROPERTIES_FILE,
    PARTITION_METADATA_FILE,
    RECOVERY_POINT_FILE,
    MalformedFile,
    decode_clean_shutdown,
    decode_epochs,
    decode_meta_properties,
    decode_offsets,
    decode_topic_id,
)
from minibroker.broker.storage.indexes import aborted_index
from minibroker.broker.storage.indexes.index import OFFSET_INDEX, TIME_INDEX, InvalidIndex
from minibroker.broker.storage.inspection import batches as inspection
from minibroker.broker.storage.inspection import verification
from minibroker.broker.storage.producer_state import NO_COORDINATOR, NO_OFFSET, InvalidSnapshot, decode_snapshot
from minibroker.broker.storage.recovery.continuity import CONTINUITY_FILE, decode_continuity
from minibroker.broker.storage.segment import LOG_SUFFIX
from minibroker.client.cli.records.record_format import text_or_base64
from minibroker.client.cli.terminal.output import UNHEALTHY, Format, FormatOption, UsageError, print_json
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.records import CorruptRecord, DecodedBatch, decode_batch, decode_control_batch
from minibroker.protocol.words import counted

DumpArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH...",
        help="A file, a partition's directory, or a broker's data directory.",
        show_default=False,
    ),
]
VerifyArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="PATH...",
        help=f"A segment ({LOG_SUFFIX} file), a partition's directory, or a broker's data directory.",
        show_default=False,
    ),
]

app = typer.Typer(help="Read the files of a stopped broker.", no_args_is_help=True)

Entry = dict[str, Any]


@app.command()
def dump(
    paths: DumpArgument,
    records: Annotated[
        bool, typer.Option("--records", help="Also print key, value and headers of each record.")
    ] = False,
    format: FormatOption = Format.TABLE,
) -> None:
    """Print the content of files: batches, index entries, producers, aborted transactions, offsets, leader epochs,
    and invalid bytes.

    With --format json, prints one object per line. Exit code 4 if there are invalid bytes."""
    is_damaged = False
    for path in paths:
        for file in _files(path):
            if format is Format.TABLE:
                sys.stdout.write(f"{file}\n")
            for entry in _entries(file, records):
                is_damaged = is_damaged or entry["kind"] == "bad"
                if format is Format.JSON:
                    _print_json_entry({"file": str(file), **entry})
                else:
                    _print_entry(entry)
    if is_damaged:
        raise typer.Exit(UNHEALTHY)


@app.command()
def verify(paths: VerifyArgument, format: FormatOption = Format.TABLE) -> None:
    """Check files against themselves and each other.

    Covers CRCs, records, offsets, leader epochs, indexes, aborted transactions, snapshots and checkpoints. Stop the
    broker first: while it writes, its files need not agree. Exit code 4 if there is a problem."""
    for path in paths:
        _require_stopped(path)
    partitions: list[verification.PartitionReport] = []
    findings: list[verification.Finding] = []
    for path in paths:
        of_path, found = _verified(path, format)
        partitions += of_path
        findings += found
    wrong = sum(not finding.is_unclear for finding in findings)
    if format is Format.TABLE:
        state = _state(wrong, len(findings) - wrong)
        sys.stdout.write(f"{counted(len(partitions), 'partition')} with {_contents(partitions)}: {state}\n")
    if wrong:
        raise typer.Exit(UNHEALTHY)


def _contents(partitions: Sequence[verification.PartitionReport]) -> str:
    records, batches = sum(p.records for p in partitions), sum(p.batches for p in partitions)
    segments, size = sum(p.segments for p in partitions), sum(p.bytes for p in partitions)
    return (
        f"{counted(records, 'record')} in {counted(batches, 'batch', 'batches')}, {counted(segments, 'segment')}, "
        f"{counted(size, 'byte')}"
    )


def _state(wrong: int, unclear: int) -> str:
    state = counted(wrong, "problem") if wrong else "ok"
    return f"{state}, {unclear:,} unclear" if unclear else state


def _verified(path: Path, format: Format) -> tuple[list[verification.PartitionReport], list[verification.Finding]]:
    """Print the findings."""
    _require(path)
    if verification.is_data_directory(path):
        whole = verification.verify_data_directory(path)
        partitions, own = whole.partitions, whole.findings
        if format is Format.JSON:
            print_json(whole)
    elif _is_partition(path) or _is_segment(path):
        if _is_segment(path):
            report = verification.verify_segment(path, verification.checkpointed(path.absolute().parent))
        else:
            report = verification.verify_partition(path, verification.checkpointed(path))
        partitions, own = [report], []
        if format is Format.JSON:
            print_json(partitions[0])
    else:
        raise UsageError(
            f"{path} is neither a broker's data directory (with {META_PROPERTIES_FILE}), a partition's "
            f"directory (with {LOG_SUFFIX} files), nor a segment ({LOG_SUFFIX} file): name one of these, or "
            "use `minibroker log dump` for another file"
        )
    findings = [*own, *(finding for partition in partitions for finding in partition.findings)]
    if format is Format.TABLE:
        for partition in partitions:
            wrong = sum(not finding.is_unclear for finding in partition.findings)
            unclear = len(partition.findings) - wrong
            sys.stdout.write(
                f"{Path(partition.directory).name}: offsets {partition.log_start_offset} to "
                f"{partition.log_end_offset}, {_contents([partition])}: {_state(wrong, unclear)}\n"
            )
        for finding in findings:
            kind = "LOST" if finding.costs_records else "unclear" if finding.is_unclear else "wrong"
            sys.stdout.write(f"{kind}: {_where(finding)}: {finding.problem}\n")
    return partitions, findings


def _where(finding: verification.Finding) -> str:
    where = finding.file
    if finding.position is not None:
        where += f", byte {finding.position}"
        if finding.end is not None:
            where += f" to {finding.end}"
    return where


def _require(path: Path) -> None:
    if not path.exists():
        raise UsageError(f"there is no {path}: name a file, a partition's directory, or a broker's data directory")


def _require_stopped(path: Path) -> None:
    """Raise MinibrokerError if a broker has this data directory, or the one that contains it, open."""
    above = path.absolute()
    for directory in (above, *above.parents[:2]):
        if verification.is_data_directory(directory) and verification.is_in_use(directory):
            raise MinibrokerError(
                f"a broker is running on {directory} and writes to it, so its files need not agree: stop it "
                "first (`minibroker stop WHO`)"
            )


def _is_segment(path: Path) -> bool:
    parsed = inspection.base_offset_of(path.name)
    return parsed is not None and parsed[1] == LOG_SUFFIX and path.is_file()


def _is_partition(path: Path) -> bool:
    return path.is_dir() and any(child.suffix == LOG_SUFFIX for child in path.iterdir())


# --- dump --------------------------------------------------------------------------------------------------------

_OFFSETS = (RECOVERY_POINT_FILE, LOG_START_OFFSET_FILE, HIGH_WATERMARK_FILE, CLEANER_OFFSET_FILE)
_SMALL_FILES = (
    *_OFFSETS,
    LEADER_EPOCH_FILE,
    PARTITION_METADATA_FILE,
    META_PROPERTIES_FILE,
    CLEAN_SHUTDOWN_FILE,
    CONTINUITY_FILE,
)


def _is_known(path: Path) -> bool:
    return path.name in _SMALL_FILES or inspection.base_offset_of(path.name) is not None


def _files(path: Path) -> Iterator[Path]:
    """Return the files that `dump` can read: the path itself, or those in the directory and below. Raises
    UsageError."""
    _require(path)
    if path.is_file():
        if not _is_known(path):
            raise UsageError(
                f"{path.name} is not a log file: give one of {', '.join(inspection.SUFFIXES)} named after an "
                f"offset, or {', '.join(_SMALL_FILES)}"
            )
        yield path
        return
    files = [file for file in sorted(path.rglob("*")) if file.is_file() and _is_known(file)]
    if not files:
        raise UsageError(
            f"there is no log file in {path}: name a broker's data directory, or a partition's directory in it"
        )
    yield from files


def _entries(path: Path, with_records: bool) -> Iterator[Entry]:
    """Yield the entries of a file, in order."""
    parsed = inspection.base_offset_of(path.name)
    try:
        if parsed is None:
            yield from _small_file(path)
        elif parsed[1] == LOG_SUFFIX:
            yield from _batches(path, with_records)
        elif parsed[1] == OFFSET_INDEX.suffix:
            for offset, position in inspection.read_index(path, OFFSET_INDEX):
                yield {"kind": "index entry", "last_offset": parsed[0] + offset, "position": position}
        elif parsed[1] == TIME_INDEX.suffix:
            for timestamp, offset in inspection.read_index(path, TIME_INDEX):
                yield {"kind": "index entry", "timestamp": timestamp, "last_offset": parsed[0] + offset}
        elif parsed[1] == aborted_index.SUFFIX:
            yield from ({"kind": "aborted transaction", **one._asdict()} for one in inspection.read_aborted(path))
        else:
            for producer_id, producer in decode_snapshot(path.read_bytes()):
                entry = {"kind": "producer", "producer_id": producer_id, "producer_epoch": producer.epoch}
                if producer.coordinator_epoch != NO_COORDINATOR:
                    entry["coordinator_epoch"] = producer.coordinator_epoch
                if producer.open_since != NO_OFFSET:
                    entry["open_since"] = producer.open_since
                yield from ({**entry, **batch._asdict()} for batch in producer.batches)
                if not producer.batches:
                    yield entry
    except (MalformedFile, InvalidIndex, InvalidSnapshot) as error:
        yield {"kind": "bad", "position": 0, "end": path.stat().st_size, "problem": str(error)}


def _small_file(path: Path) -> Iterator[Entry]:
    name, data = str(path), path.read_bytes()
    if path.name in _OFFSETS:
        for (topic, partition), offset in decode_offsets(name, data).items():
            yield {"kind": "offset", "topic": topic, "partition": partition, "offset": offset}
    elif path.name == LEADER_EPOCH_FILE:
        for epoch, start_offset in decode_epochs(name, data):
            yield {"kind": "leader epoch", "epoch": epoch, "start_offset": start_offset}
    elif path.name == PARTITION_METADATA_FILE:
        yield {"kind": "topic", "topic_id": decode_topic_id(name, data)}
    elif path.name == META_PROPERTIES_FILE:
        yield {"kind": "owner", **decode_meta_properties(name, data)._asdict()}
    elif path.name == CLEAN_SHUTDOWN_FILE:
        yield {"kind": "clean shutdown", "broker_epoch": decode_clean_shutdown(name, data)}
    else:
        found = decode_continuity(name, data)
        yield {
            "kind": "continuity",
            "boot_id": found.boot_id,
            "trusted_since": found.trusted_since,
            "synced_since": found.synced_since,
        }


def _batches(path: Path, with_records: bool) -> Iterator[Entry]:
    for part in inspection.scan(path):
        if isinstance(part, inspection.BadBytes):
            problem = f"{part.problem}, where the file ends" if part.is_incomplete else part.problem
            yield {"kind": "bad", "position": part.position, "end": part.end, "problem": problem}
            continue
        header = part.header
        entry: Entry = {
            "kind": "control batch" if header.is_control else "batch",
            "position": part.position,
            "size": header.size,
            "first_offset": header.base_offset,
            "last_offset": header.last_offset,
            "records_count": header.records_count,
            "max_timestamp": header.max_timestamp,
            "leader_epoch": header.partition_leader_epoch,
            "compression": header.compression.name.lower(),
            "magic": header.magic,
        }
        if header.has_producer_id:
            entry |= {
                "producer_id": header.producer_id,
                "producer_epoch": header.producer_epoch,
                "first_sequence": header.base_sequence,
                "last_sequence": header.last_sequence,
            }
        if header.is_transactional:
            entry["transactional"] = True
        try:
            if header.is_control:
                marker = decode_control_batch(part.data, header)
                entry |= {"marker": marker.type.name, "coordinator_epoch": marker.coordinator_epoch}
            elif with_records:
                entry["records"] = _records(part)
        except CorruptRecord as error:
            problem = (
                f"the CRC is right, but the records at offsets {header.base_offset} to {header.last_offset} cannot be "
                f"read: {error}. Consumers stop there until they seek to {header.next_offset}"
            )
            yield {"kind": "bad", "position": part.position, "end": part.end, "problem": problem}
        yield entry


def _records(batch: inspection.Batch) -> Iterator[Entry]:
    """Decode the batch, and yield its records. A list of them might take terabytes: a few bytes may stand for a column
    of a million values. Raises CorruptRecord at once."""
    return _entries_of(decode_batch(batch.data, batch.header, check_crc=False))


def _entries_of(decoded: DecodedBatch) -> Iterator[Entry]:
    for part in decoded.parts():
        for number, (offset, timestamp) in enumerate(zip(part.offsets, part.timestamps, strict=True)):
            record: Entry = {
                "offset": offset,
                "timestamp": timestamp,
                **text_or_base64("key", None if part.keys is None else part.keys[number]),
                **text_or_base64("value", part.values[number]),
            }
            headers = None if part.headers is None else part.headers[number]
            if headers:
                record["headers"] = [{"name": name, **text_or_base64("value", value)} for name, value in headers]
            yield record


def _print_json_entry(entry: Entry) -> None:
    """Print a line of JSON, record by record."""
    records: Iterator[Entry] | None = entry.pop("records", None)
    if records is None:
        print_json(entry)
        return
    sys.stdout.write(msgspec.json.encode(entry).decode().removesuffix("}") + ',"records":[')
    for number, record in enumerate(records):
        sys.stdout.write("," * (number > 0) + msgspec.json.encode(record).decode())
    sys.stdout.write("]}\n")


def _print_entry(entry: Entry) -> None:
    records: Iterable[Entry] = entry.pop("records", ())
    _print_line("  ", entry)
    for record in records:
        _print_line("    ", {"kind": "record", **record})


def _print_line(indent: str, entry: Entry) -> None:
    fields = dict(entry)
    kind = "BAD" if fields["kind"] == "bad" else fields["kind"]
    del fields["kind"]
    shown = " ".join(f"{name}={_shown(name, value)}" for name, value in fields.items())
    sys.stdout.write(f"{indent}{kind}: {shown}\n")


def _shown(name: str, value: object) -> str:
    if isinstance(value, int) and name in ("timestamp", "max_timestamp"):
        return _time(value)
    if value is None or isinstance(value, int):
        return "null" if value is None else str(value)
    return repr(value)


def _time(timestamp_ms: int) -> str:
    try:
        return datetime.fromtimestamp(timestamp_ms / 1_000, UTC).isoformat(timespec="milliseconds")
    except (OverflowError, ValueError, OSError):
        return str(timestamp_ms)
