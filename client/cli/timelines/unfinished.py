"""The failover that may be coming: brokers that are lost, though no controller has recorded it yet. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from minibroker.client.administering.timeline import Entry
from minibroker.protocol.errors import MinibrokerError, NetworkError


def unfinished(
    entries: Sequence[Entry], errors: Mapping[int, MinibrokerError], registered: Collection[int]
) -> Iterator[str]:
    """Yield a sentence for each broker that is registered and does not answer, and for each that is not registered any
    more although the entries, read before, have it alive. `errors`: of the brokers that did not answer, by id."""
    silent = [broker_id for broker_id, error in errors.items() if isinstance(error, NetworkError)]
    for broker_id in sorted({*silent} & {*registered}):
        yield (
            f"broker {broker_id} does not answer ({errors[broker_id]}): it is replaced when its session with ZooKeeper "
            "ends; see `minibroker status`"
        )
    if not {*errors} & {*registered}:  # else the loss of another broker may be recorded in entries that are missing
        for broker_id in sorted(_alive(entries) - {*registered}):
            yield f"broker {broker_id} has left the cluster, and no other leads in its place yet: ask again in a moment"


def _alive(entries: Sequence[Entry]) -> set[int]:
    """Return the brokers in the cluster after these entries, as far as they tell."""
    alive: set[int] = set()
    for entry in entries:
        if entry["event"] == "Startup" and "brokers" in entry:
            alive = {*entry["brokers"]}
        alive -= {*entry.get("unreachable", []), *entry.get("lost", [])}
        alive |= {*entry.get("added", [])}
    return alive
