"""Planted bugs: one for each kind that such a system is known for, to show that the storms would find it.

A storm in which nothing goes wrong says little as long as nobody knows what it could have seen. So each family of bugs
in the catalogue is planted, as the smallest change that somebody could have made, and the storm must accuse it: by a
client's history, by an invariant of the whole cluster, or because the cluster does not recover. A bug that only makes a
broker stumble over an assertion of its own shows nothing, so none is planted that way.

The product knows nothing of this. `planted` replaces functions while it lasts (see `planting`).

Where the product has two fences against the same bug, taking down one shows nothing: then the mutant takes down both,
and says so. What costs time alone is not planted, since no promise is broken by it: a client that believes older
metadata asks again; a broker that lost its watch on /controller runs when it is started, and others run meanwhile. Nor
is producers' state that outlives a truncation (ten storms had no retry at the right moment): test_storage_log.py is
there for it. What is wrong with the order of flushes and acknowledgements shows in topics with durability=synced alone,
since no other replica is believed after a power cut: test_synced_topics.py plays it out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tests.simulation.mutants import (
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
    )
    for mutant in mutants_of(module)
}


@contextmanager
def planted(name: str | None) -> Iterator[None]:
    """Plant the mutant of that name for as long as this lasts; None: nothing."""
    patches = Patches()
    try:
        if name is not None:
            MUTANTS[name].plant(patches)
        yield
    finally:
        patches.undo()
