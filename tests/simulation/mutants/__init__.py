"""Planted bugs, one for each known kind of bug in such systems. They show that the storms would find it.

A storm without anomalies proves little unless it is known which bugs it can detect. Each family of bugs in the
catalogue is therefore planted, as the smallest plausible mistake, and a storm must expose it: in a client's history, by
an invariant of the whole cluster, or because the cluster does not recover. A bug that only fails an assertion of the
product itself would prove nothing, so none is planted that way.

The product does not know the mutants. `planted` replaces functions for its duration (see `planting`).

If the product has two fences against the same bug, removing one has no effect; the mutant removes both, and its text
says so. Not planted: - Bugs that only cost time and break no guarantee. A client with older metadata asks again. A
broker without its watch on
  /controller becomes a candidate at its start, and other brokers are candidates meanwhile.
- Producer state that survives a truncation. Ten storms had no retry at the right moment; test_storage_log.py tests it.

A wrong order of flushes and acknowledgements is visible only in topics with durability=synced, because other replicas
are not trusted after a power cut; test_synced_topics.py tests it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.simulation.mutants import (
    authentication,
    clients,
    configs,
    control,
    elections,
    groups,
    kafka,
    reassignments,
    replication,
    requested_elections,
    retention,
    shutdown,
    storage,
    topics,
)
from tests.simulation.mutants.of_transactions import group_offsets, kafkas_bugs, leaders, processors, producers, spark
from tests.simulation.mutants.planting import Mutant, Patches, mutants_of

__all__ = ["MUTANTS", "Mutant", "Patches", "planted"]

MUTANTS: dict[str, Mutant] = {
    mutant.name: mutant
    for module in (
        replication,
        elections,
        control,
        storage,
        retention,
        clients,
        shutdown,
        configs,
        topics,
        requested_elections,
        reassignments,
        groups,
        kafka,
        leaders,
        kafkas_bugs,
        group_offsets,
        producers,
        spark,
        processors,
        authentication,
    )
    for mutant in mutants_of(module)
}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Plant the mutant of that name for the duration of the context; None: no mutant."""
    patches = Patches()
    try:
        if name is not None:
            MUTANTS[name].plant(patches)
        yield
    finally:
        patches.undo()
