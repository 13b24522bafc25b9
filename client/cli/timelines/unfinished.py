"""What a failover does not tell: brokers that are lost or have no ZooKeeper, though no controller has recorded it yet,
and brokers that answered nothing, or had no ZooKeeper, for a while and were not replaced. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from minibroker.client.administering.timeline import Entry
from minibroker.client.cli.timelines.turns import INTERRUPTIONS, STALLED, alive_after
from minibroker.client.cli.timelines.words import date_and_time, milliseconds, unrecorded
from minibroker.protocol.errors import MinibrokerError, NetworkError
from minibroker.protocol.words import all_of


def unfinished(
    entries: Sequence[Entry],
    errors: Mapping[int, MinibrokerError],
    registered: Collection[int],
    away_s: Mapping[int, float],
) -> Iterator[str]:
    """Yield a sentence for the brokers that have no ZooKeeper, for each broker that is registered and does not answer,
    and for each that is not registered any more although the entries, read before, have it alive. `errors`: of the
    brokers that did not answer, by id. `away_s`: for how long brokers have had no ZooKeeper, by id."""
    if away_s:
        ids = sorted(away_s)
        have, then = "have", "if their sessions with ZooKeeper end, they are replaced"
        if len(ids) == 1:
            have, then = "has", "if its session with ZooKeeper ends, it is replaced"
        if {*registered} - {*errors} <= {*ids}:
            then = "nothing can be elected or recorded without it"
        for_s = f"{max(away_s.values()):,.0f} s"
        yield f"{all_of('broker', ids)} {have} had no ZooKeeper for {for_s}: {then}; see `minibroker status`"
    silent = [broker_id for broker_id, error in errors.items() if isinstance(error, NetworkError)]
    for broker_id in sorted({*silent} & {*registered}):
        yield (
            f"broker {broker_id} does not answer ({errors[broker_id]}): if its session with ZooKeeper ends, it is "
            "replaced; see `minibroker status`"
        )
    if not {*errors} & {*registered}:  # else the loss of another broker may be recorded in entries that are missing
        for broker_id in sorted(alive_after(entries) - {*registered}):
            yield f"broker {broker_id} has left the cluster, and no other leads in its place yet: ask again in a moment"


def stalls(entries: Sequence[Entry], since_ms: float) -> Iterator[str]:
    """Yield a sentence for the last stall of each broker, if it began after `since_ms`."""
    last = {entry["controller"]: entry for entry in entries if entry["event"] == STALLED}
    for broker_id, entry in sorted(last.items()):
        if entry["time_ms"] - entry["lasted_ms"] > since_ms:
            yield f"broker {broker_id} answered nothing {_how_long(entry)}: see `minibroker timeline`"


def interruptions(entries: Sequence[Entry], most: int) -> list[str]:
    """Return a sentence for each of the last `most` times, newest first, in which a broker did not run or had no answer
    from ZooKeeper."""
    found = sorted((entry for entry in entries if entry["event"] in INTERRUPTIONS), key=lambda entry: entry["time_ms"])
    return [_interruption(entry) for entry in found[: -most - 1 : -1]]


def _interruption(entry: Entry) -> str:
    if entry["event"] == STALLED:
        what, why = "answered nothing", "its process was stopped or got no processor"
    else:
        what, why = "had no answer from ZooKeeper", "its session went on, so it was not replaced"
    return f"broker {entry['controller']} {what} {_how_long(entry)}: {why}.{unrecorded(entry)}"


def _how_long(entry: Entry) -> str:
    return f"for {milliseconds(entry['lasted_ms'])} until {date_and_time(entry['time_ms'])}"
