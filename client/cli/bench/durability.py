"""`minibroker bench durability`: the cost of `durability=synced` compared with `replicated`, in turns on the same
cluster."""

from __future__ import annotations

from random import SystemRandom
from statistics import median
from typing import Annotated, NamedTuple

import typer

from minibroker.client.cli.bench.latency import Measurement
from minibroker.client.cli.bench.produce import SizeOption, send_all
from minibroker.client.cli.bench.report import percentile
from minibroker.client.cli.bench.topic import ReplicationFactorOption
from minibroker.client.cli.bench.values import Values
from minibroker.client.cli.records.produce import Acks, Codec
from minibroker.client.cli.terminal.output import (
    DEFAULT_DATA,
    BootstrapOption,
    DataOption,
    Format,
    FormatOption,
    bootstrap_servers,
    note,
    print_json,
    print_table,
    run,
)
from minibroker.client.cli.topics import open_admin
from minibroker.protocol.model import DURABILITY, REPLICATED, SYNCED

_MODES = (REPLICATED, SYNCED)
_PARTITIONS = (1, 3, 12)


class _Round(NamedTuple):
    """The figures of one topic."""

    records_per_second: float
    p50_ms: float
    p99_ms: float


def durability(
    partitions: Annotated[
        list[int] | None,
        typer.Option(
            min=1, max=10_000, help="Partitions of a topic. May be repeated. Default: 1, 3 and 12, one after the other."
        ),
    ] = None,
    records: Annotated[
        int, typer.Option(min=1, max=100_000_000, help="Records for the throughput, sent as fast as possible.")
    ] = 300_000,
    rate: Annotated[float, typer.Option(min=1, max=100_000, help="Records per second for the latency.")] = 500,
    seconds: Annotated[float, typer.Option(min=0.1, max=3600, help="Duration of the latency measurement.")] = 3,
    rounds: Annotated[
        int, typer.Option(min=1, max=100, help="Rounds of each measurement; the medians are printed.")
    ] = 3,
    size: SizeOption = 100,
    replication_factor: ReplicationFactorOption = None,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Compare topics with durability=synced and replicated: throughput, and latency to acknowledgement (acks=all).

    The two take turns, each on new topics that are deleted afterwards."""
    servers = bootstrap_servers(bootstrap, data)
    note("making values ...")
    source, number_of_run = Values(), SystemRandom().getrandbits(32)
    values = [source.make(number_of_run, number, size) for number in range(records)]
    rows = []
    for count in partitions or _PARTITIONS:
        found: dict[str, list[_Round]] = {mode: [] for mode in _MODES}
        for number in range(1, rounds + 1):
            for mode in _MODES:
                note(f"{count} partitions, {mode}, round {number} of {rounds} ...")
                measured = run(_round(servers, mode, count, replication_factor, values, rate, seconds, size))
                found[mode].append(measured)
        replicated, synced = (_Round(*map(median, zip(*found[mode], strict=True))) for mode in _MODES)
        rows.append(
            {
                "partitions": count,
                "replicated_records_per_second": round(replicated.records_per_second),
                "synced_records_per_second": round(synced.records_per_second),
                "ratio": round(synced.records_per_second / replicated.records_per_second, 2),
                "replicated_p50_ms": round(replicated.p50_ms, 2),
                "synced_p50_ms": round(synced.p50_ms, 2),
                "replicated_p99_ms": round(replicated.p99_ms, 2),
                "synced_p99_ms": round(synced.p99_ms, 2),
            }
        )
    if format is Format.JSON:
        print_json(rows)
    else:
        print_table([name.replace("_", " ") for name in rows[0]], [list(row.values()) for row in rows])


async def _round(
    bootstrap: str,
    mode: str,
    partitions: int,
    replication_factor: int | None,
    values: list[bytes],
    rate: float,
    seconds: float,
    size: int,
) -> _Round:
    topic = f"bench-{mode}-{SystemRandom().getrandbits(32):08x}"
    async with open_admin(bootstrap) as admin:
        await admin.create_topic(
            topic, partitions=partitions, replication_factor=replication_factor, configs={DURABILITY: mode}
        )
        try:
            measurement = Measurement(rate, max(1, round(rate * seconds)), size)
            await measurement.make(bootstrap, topic, None, None, Acks.ALL, Codec.NONE)
            took_s = await send_all(bootstrap, topic, values, Acks.ALL, Codec.NONE)
        finally:
            await admin.delete_topic(topic)
    times = sorted(measurement.acknowledged_after_s)
    return _Round(len(values) / took_s, percentile(times, 0.5) * 1_000, percentile(times, 0.99) * 1_000)
