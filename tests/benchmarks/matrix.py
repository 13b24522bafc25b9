"""The benchmark matrix: all claims of speed, each beside its baseline, in one run.

    python -m tests.benchmarks.matrix [--quick] [--group NAME]... [--json FILE] [--data DIR]

Starts its own clusters (on free ports, in DIR/cluster, which is removed at the end), runs the users' commands
(`minibroker bench produce`, `consume`, `latency`, `failover`), checks the records read, and prints a table for each
group. Every table has a baseline of the same run, since absolute figures of a shared machine mean little. It takes
seven minutes on two idle cores; `--quick` takes half a minute and is a trial rather than a measurement.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from minibroker.client.admin import Admin
from minibroker.client.cli.terminal.output import print_table
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.local.ports import free_ports
from minibroker.deploy.local.processes import is_alive, let_signals_interrupt
from minibroker.protocol.errors import MinibrokerError
from tests.benchmarks import bench_control_plane, bench_timing_wheel, raw_loopback

BROKERS = 3
CENTRE_PARTITIONS = 10
LATENCY_RATE = 5_000
LATENCY_PARTITIONS = 3
LATENCIES = (
    (LATENCY_RATE, LATENCY_PARTITIONS, 1, "1"),
    (LATENCY_RATE, LATENCY_PARTITIONS, 3, "1"),
    (LATENCY_RATE, LATENCY_PARTITIONS, 3, "all"),
    (LATENCY_RATE, 100, 3, "all"),
    (4 * LATENCY_RATE, LATENCY_PARTITIONS, 3, "all"),
)
"""Records per second, partitions, replicas and acks of each row; the first is the baseline."""
COMMAND_TIMEOUT_S = 300.0
TOPIC_TIMEOUT_S = 120.0
"""Limit for a thousand partitions on a machine with other load."""

Row = dict[str, object]


class Table(NamedTuple):
    name: str
    caption: str
    rows: list[Row]


class Effort(NamedTuple):
    """The amount of work, and with it the precision of the figures."""

    repeats: int
    sizes: tuple[int, ...]
    """Bytes per value."""
    replication: tuple[tuple[int, str], ...]
    """Replicas and acks."""
    bytes_of_small: int
    """Bytes of small values in each run; three times as many of large values."""
    partitions: tuple[int, ...]
    raw_megabytes: int
    latency_s: float
    failover_rounds: dict[str, int]
    probe_s: float
    pending: tuple[int, ...]


FULL = Effort(
    repeats=3,
    sizes=(100, 1_024),
    replication=((1, "1"), (1, "all"), (3, "1"), (3, "all")),
    bytes_of_small=60_000_000,
    partitions=(1, 100, 1_000),
    raw_megabytes=256,
    latency_s=10,
    failover_rounds={"leader": 5, "controller": 5, "zookeeper": 5},
    probe_s=5,
    pending=(1_000, 100_000, 1_000_000),
)
QUICK = Effort(
    repeats=1,
    sizes=(100,),
    replication=((1, "1"), (3, "all")),
    bytes_of_small=1_000_000,
    partitions=(100,),
    raw_megabytes=16,
    latency_s=1,
    failover_rounds={"leader": 1},
    probe_s=0.5,
    pending=(1_000,),
)


class Bench:
    """Runs `minibroker` commands on a cluster."""

    def __init__(self, cluster: LocalCluster, effort: Effort) -> None:
        self.cluster = cluster
        self.effort = effort
        self._numbers = itertools.count(1)

    def command(self, *arguments: str) -> Any:
        """Run the command; return its JSON. Raises SystemExit with the command's stderr if it fails."""
        command = [*arguments, "--data", str(self.cluster.directory), "--format", "json"]
        ended = subprocess.run(
            [sys.executable, "-m", "minibroker", *command],
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        if ended.returncode:
            raise SystemExit(f"minibroker {' '.join(command)}: exit code {ended.returncode}: {ended.stderr.strip()}")
        return json.loads(ended.stdout)

    @contextlib.contextmanager
    def topic(self, partitions: int, replicas: int) -> Iterator[str]:
        """A new topic, known to every broker. It is deleted from every disk afterwards, so that it does not affect the
        next row."""
        name = f"bench-{next(self._numbers)}"
        uvloop.run(self._create(name, partitions, replicas))
        yield name
        uvloop.run(self._delete(name))

    async def _create(self, name: str, partitions: int, replicas: int) -> None:
        async with asyncio.timeout(TOPIC_TIMEOUT_S), self._admin() as admin:
            await admin.create_topic(name, partitions=partitions, replication_factor=replicas)
            while True:
                view = await asyncio.to_thread(self.cluster.view)
                if sum(1 for known in view.partitions if known.topic == name) == partitions:
                    return
                await asyncio.sleep(0.05)

    async def _delete(self, name: str) -> None:
        async with asyncio.timeout(TOPIC_TIMEOUT_S), self._admin() as admin:
            await admin.delete_topic(name)
            while any(self.cluster.directory.glob(f"broker-*/{name}-*")):
                await asyncio.sleep(0.05)

    def _admin(self) -> Admin:
        return Admin(
            self.cluster.bootstrap(),
            request_timeout_ms=TOPIC_TIMEOUT_S * 1_000,
            default_api_timeout_ms=TOPIC_TIMEOUT_S * 1_000,
        )


# --- produce and consume ---


class Load(NamedTuple):
    size: int
    replicas: int
    acks: str
    partitions: int

    def baseline(self) -> Load:
        """The same records without replication: one replica, acks=1."""
        return Load(self.size, 1, "1", CENTRE_PARTITIONS)


def loads(effort: Effort) -> list[Load]:
    """Each size with each replication and the usual number of partitions, then other numbers of partitions."""
    around = [
        Load(size, replicas, acks, CENTRE_PARTITIONS) for size in effort.sizes for replicas, acks in effort.replication
    ]
    return around + [Load(100, 3, "all", partitions) for partitions in effort.partitions]


class Measured(NamedTuple):
    """Records per second, by run."""

    produced: list[float]
    produced_by_batches: list[float]
    by_batches: list[float]
    by_records: list[float]


def produce_and_consume(bench: Bench) -> Iterator[Table]:
    effort = bench.effort
    raw = raw_loopback.measure(bench.cluster.directory, effort.raw_megabytes)
    measured: dict[Load, Measured] = {}
    for load in loads(effort):
        tell(f"produce and consume: {', '.join(f'{name} {value}' for name, value in load._asdict().items())}")
        runs = [_produce_and_consume_once(bench, load) for _ in range(effort.repeats)]
        measured[load] = Measured(*(list(column) for column in zip(*runs, strict=True)))
    after = raw_loopback.measure(bench.cluster.directory, effort.raw_megabytes)
    raw = raw_loopback.Raw(max(raw.produce, after.produce), max(raw.consume, after.consume))
    rows: dict[str, list[Row]] = {"produce": [], "consume": []}
    for load, each in measured.items():
        base = measured[load.baseline()]
        for name, runs_of, base_of, raw_rate in (
            ("produce", each.produced, base.produced, raw.produce),
            ("consume", each.by_batches, base.by_batches, raw.consume),
        ):
            median = statistics.median(runs_of)
            row: Row = {
                **load._asdict(),
                "records/s": round(median),
                "from": round(min(runs_of)),
                "to": round(max(runs_of)),
                "MB/s": round(median * load.size / 1e6, 1),
                "of raw": ratio(median * load.size / 1e6, raw_rate),
                "of 1 replica, acks 1": ratio(median, statistics.median(base_of)),
            }
            if name == "produce":
                row["by send_batch"] = round(statistics.median(each.produced_by_batches))
            else:
                row["by records"] = round(statistics.median(each.by_records))
            rows[name].append(row)
    yield Table(
        "produce",
        f"One producer process, distinct incompressible values; median of {effort.repeats}, from first `send` to last "
        "acknowledgement, and the same with `send_batch` of 10,000 records, to another topic. Raw: one copy of the "
        "bytes, with checksums, sent over loopback, written to a file and acknowledged, without a broker: "
        f"{raw.produce:,.0f} MB/s. Three replicas are written three times, on the same cores.",
        rows["produce"],
    )
    yield Table(
        "consume",
        "One consumer process reads what `send` sent, by batches, and once more by records; median of "
        f"{effort.repeats}. Another pass, which is not timed, compares the records read with those sent. Raw: read "
        f"from a file, sent over loopback, with checksums: {raw.consume:,.0f} MB/s.",
        rows["consume"],
    )


def _produce_and_consume_once(bench: Bench, load: Load) -> tuple[float, ...]:
    records = bench.effort.bytes_of_small * (1 if load.size == 100 else 3) // load.size
    sent = ("--records", str(records), "--size", str(load.size), "--acks", load.acks)
    with bench.topic(load.partitions, load.replicas) as topic:
        by_batches = bench.command("bench", "produce", topic, *sent, "--by", "batches")["records_per_second"]
    with bench.topic(load.partitions, load.replicas) as topic:
        rates = [bench.command("bench", "produce", topic, *sent)["records_per_second"], by_batches]
        for by in ("batches", "records"):
            consumed = bench.command("bench", "consume", topic, "--by", by)
            if consumed["records"] != records or consumed["checked"] != records:
                raise SystemExit(f"{records} records were sent as {load}, but the consumer found {consumed}")
            rates.append(consumed["records_per_second"])
    return tuple(rates)


# --- latency ---


def latency(bench: Bench) -> Iterator[Table]:
    rows: list[Row] = []
    baseline: dict[str, float] | None = None
    for rate, partitions, replicas, acks in LATENCIES:
        tell(f"latency: {rate:,} records per second, {partitions} partitions, {replicas} replicas, acks {acks}")
        with bench.topic(partitions, replicas) as topic:
            measured = bench.command(
                *("bench", "latency", topic, "--rate", str(rate), "--acks", acks),
                *("--seconds", str(bench.effort.latency_s)),
            )
        acknowledged = measured["acknowledged_ms"]
        baseline = baseline or acknowledged
        rows.append(
            {
                "records/s": rate,
                "partitions": partitions,
                "replicas": replicas,
                "acks": acks,
                **{f"acked {name}": value for name, value in acknowledged.items()},
                "of first p50": ratio(acknowledged["p50"], baseline["p50"]),
                "of first p99": ratio(acknowledged["p99"], baseline["p99"]),
                "consumed p50": measured["consumed_ms"]["p50"],
                "consumed p99": measured["consumed_ms"]["p99"],
                "sent late p99": measured["sent_ms"]["p99"],
            }
        )
    yield Table(
        "latency",
        f"Milliseconds from the due time of a record until its producer saw the acknowledgement, and until a consumer "
        f"had it; records of 100 bytes for {bench.effort.latency_s:g} s, sent on an open schedule. Sent late: the "
        "sender's own delay, which the other figures include. The first row is the baseline: no replication.",
        rows,
    )


# --- failover ---


def failover(bench: Bench) -> Iterator[Table]:
    rows: list[Row] = []
    for who, rounds in bench.effort.failover_rounds.items():
        tell(f"failover: {who}")
        measured = bench.command("bench", "failover", "--who", who, "--rounds", str(rounds))
        rows.append(
            {
                "killed": who,
                "rounds": rounds,
                **{name: measured[name] for name in ("acknowledged", "lost", "duplicated")},
                "gap median ms": measured["gap_median_ms"],
                "p95": measured["gap_p95_ms"],
                "max": measured["gap_max_ms"],
                "quiet gap ms": measured["quiet_gap_ms"],
                "median of quiet": ratio(measured["gap_median_ms"], measured["quiet_gap_ms"]),
            }
        )
    yield Table(
        "failover",
        "The longest time without an acknowledgement on one of 3 partitions (3 replicas, acks=all, a record per "
        "millisecond to each) around a SIGKILL. Quiet: the same in the second before the first kill.",
        rows,
    )


# --- control plane ---


def control_plane(bench: Bench) -> Iterator[Table]:
    tell("control plane under a flood of produce requests")
    measured, per_second = uvloop.run(bench_control_plane.measure(bench.cluster, bench.effort.probe_s))
    idle = {(row.request, row.listener): row for row in measured if row.load == bench_control_plane.IDLE}
    rows: list[Row] = []
    control_p99_ms = 0.0
    for row in measured:
        if row.load == bench_control_plane.IDLE:
            continue
        before = idle[row.request, row.listener]
        control_p99_ms = control_p99_ms or row.p99_ms
        rows.append(
            {
                "request": row.request,
                "listener": row.listener,
                "idle p50": round(before.p50_ms, 2),
                "idle p99": round(before.p99_ms, 2),
                "flood p50": round(row.p50_ms, 2),
                "flood p99": round(row.p99_ms, 2),
                "flood max": round(row.max_ms, 2),
                "p99 of idle": ratio(row.p99_ms, before.p99_ms),
                "p99 of UpdateMetadata": ratio(row.p99_ms, control_p99_ms),
            }
        )
    yield Table(
        "control-plane",
        "Milliseconds of one request at a time to an idle broker, and to one that "
        f"{bench_control_plane.CONNECTIONS} connections flood with produce requests (acks=1; it answered "
        f"{per_second:,.0f} of them per second). Both listeners accept ApiVersions, so its two rows differ only in the "
        "plane.",
        rows,
    )


# --- timing wheel ---


def timing_wheel(bench: Bench) -> Iterator[Table]:
    rows: list[Row] = []
    for pending in bench.effort.pending:
        tell(f"timing wheel: {pending:,} pending")
        baseline: bench_timing_wheel.Result | None = None
        for result in bench_timing_wheel.compare(pending, 1 if pending > 100_000 else bench.effort.repeats):
            baseline = baseline or result
            row: Row = {
                "pending": pending,
                "kept by": result.name,
                "insert and cancel us": round(result.insert_and_cancel_us, 2),
                "of wheel": ratio(result.insert_and_cancel_us, baseline.insert_and_cancel_us),
                "insert and expire us": None,
                "of wheel ": None,
            }
            if result.insert_and_expire_us is not None and baseline.insert_and_expire_us is not None:
                row["insert and expire us"] = round(result.insert_and_expire_us, 2)
                row["of wheel "] = ratio(result.insert_and_expire_us, baseline.insert_and_expire_us)
            rows.append(row)
    yield Table(
        "timing-wheel",
        "Microseconds per timeout, by the number of pending ones: inserted and cancelled, the usual case; inserted and "
        "expired. Timer is the wheel with the loop's timer that drives it.",
        rows,
    )


GROUPS: dict[str, Callable[[Bench], Iterator[Table]]] = {
    "produce-consume": produce_and_consume,
    "latency": latency,
    "failover": failover,
    "control-plane": control_plane,
    "timing-wheel": timing_wheel,
}


def ratio(value: float, baseline: float) -> str:
    return f"{value / baseline:.2f}x" if baseline else "-"


def tell(text: str) -> None:
    print(f"... {text}", file=sys.stderr, flush=True)


def show(table: Table) -> None:
    print(f"\n{textwrap.fill(f'{table.name}: {table.caption}', 120)}\n")
    cells = [[f"{cell:,}" if type(cell) is int else cell for cell in row.values()] for row in table.rows]
    print_table(list(table.rows[0]), cells)
    sys.stdout.flush()


@contextlib.contextmanager
def running_cluster(directory: Path) -> Iterator[LocalCluster]:
    """New brokers. At the end their processes are always stopped by pid, and their data is removed."""
    cluster = LocalCluster(directory / "cluster")
    before = cluster.file_or_none()
    if before is not None and any(is_alive(process) for process in before.processes()):
        raise SystemExit(
            f"a matrix runs in {directory}, or was killed there: wait for it, use another --data, or end its cluster "
            f"with `minibroker down --data {cluster.directory}`"
        )
    shutil.rmtree(cluster.directory, ignore_errors=True)  # the remains of a killed matrix
    try:
        cluster.up(BROKERS, free_ports(BROKERS)[0])
        yield cluster
    finally:
        cluster.down(kill=True)
        shutil.rmtree(cluster.directory)
        with contextlib.suppress(OSError):  # other files there belong to the user
            directory.rmdir()


def machine() -> dict[str, object]:
    return {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()}


def measure(directory: Path, effort: Effort, groups: Sequence[str]) -> list[Table]:
    tables = []
    for name in groups:
        # A new cluster for each group, so that no group affects the next.
        with running_cluster(directory) as cluster:
            for table in GROUPS[name](Bench(cluster, effort)):
                show(table)
                tables.append(table)
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="few records, few rows: half a minute")
    parser.add_argument("--group", action="append", choices=list(GROUPS), help="run only this group; may be repeated")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the tables to this file too")
    parser.add_argument("--data", type=Path, metavar="DIR", default=Path(".minibroker/bench"), help="for the clusters")
    arguments = parser.parse_args()
    let_signals_interrupt()
    began = time.monotonic()
    try:
        tables = measure(arguments.data, QUICK if arguments.quick else FULL, arguments.group or list(GROUPS))
    except (MinibrokerError, TimeoutError, KeyboardInterrupt) as error:
        sys.exit(f"error: {error}" if str(error) else 130)
    tell(f"{time.monotonic() - began:.0f} s in all")
    if arguments.json:
        found = {"machine": machine(), "tables": [table._asdict() for table in tables]}
        arguments.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
