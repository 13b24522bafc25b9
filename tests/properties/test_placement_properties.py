"""Replica placement for any brokers and racks: different racks, an even number of leaders and of replicas on each
broker."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minibroker.controller.decisions.placement import Racks, assign_more_replicas, assign_replicas

FIRST_RACK = 65


@st.composite
def clusters(draw: st.DrawFn) -> dict[int, str | None]:
    """Brokers with any ids, in racks of any sizes."""
    ids = draw(st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True))
    return {broker_id: chr(FIRST_RACK + draw(st.integers(0, 4))) for broker_id in ids}


@st.composite
def even_clusters(draw: st.DrawFn) -> dict[int, str | None]:
    """Racks of equal size, or none."""
    racks, size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    ids = draw(st.permutations(range(racks * size)))
    return {broker_id: chr(FIRST_RACK + place % racks) for place, broker_id in enumerate(ids)}


seeds = st.integers(0, 10_000)


@given(clusters(), st.integers(1, 40), seeds, st.data())
def test_replicas_are_in_as_many_racks_as_there_are(
    racks: Racks, partitions: int, seed: int, data: st.DataObject
) -> None:
    factor = data.draw(st.integers(1, len(racks)))
    assignment = assign_replicas(racks, partitions, factor, Random(seed))
    assert list(assignment) == list(range(partitions))
    for replicas in assignment.values():
        assert len(set(replicas)) == len(replicas) == factor
        assert len({racks[broker_id] for broker_id in replicas}) == min(factor, len(set(racks.values())))


@given(clusters(), st.integers(1, 40), seeds, st.booleans(), st.data())
def test_leaders_are_even(racks: Racks, partitions: int, seed: int, is_mixed: bool, data: st.DataObject) -> None:
    if is_mixed:
        racks = {**racks, 99: None}
    factor = data.draw(st.integers(1, len(racks)))
    leaders = Counter(replicas[0] for replicas in assign_replicas(racks, partitions, factor, Random(seed)).values())
    counts = [leaders[broker_id] for broker_id in racks]
    assert max(counts) - min(counts) <= 1


@given(even_clusters(), st.integers(1, 4), seeds, st.booleans(), st.data())
def test_replicas_are_even_if_racks_are_of_one_size(
    racks: Racks, rounds: int, seed: int, has_racks: bool, data: st.DataObject
) -> None:
    racks = racks if has_racks else dict.fromkeys(racks)
    factor = data.draw(st.integers(1, len(racks)))
    assignment = assign_replicas(racks, rounds * len(racks), factor, Random(seed))
    replicas = Counter(broker_id for replicas in assignment.values() for broker_id in replicas)
    assert set(replicas.values()) == {rounds * factor}


@given(clusters(), st.integers(1, 20), st.integers(1, 20), seeds, seeds, st.booleans(), st.data())
def test_partitions_that_are_added_are_placed_as_if_they_had_been_there_from_the_beginning(
    racks: Racks, before: int, more: int, seed: int, another: int, has_racks: bool, data: st.DataObject
) -> None:
    racks = racks if has_racks else dict.fromkeys(racks)
    factor = data.draw(st.integers(1, len(racks)))
    whole = assign_replicas(racks, before + more, factor, Random(seed))
    existing = {number: replicas for number, replicas in whole.items() if number < before}
    added = assign_more_replicas(racks, existing, range(before, before + more), Random(another))
    # The distance used cannot always be derived from the placement; the counts can.
    assert [replicas[0] for replicas in added.values()] == [whole[number][0] for number in added]
    if not has_racks:
        assert existing | added == whole


def test_partitions_of_a_topic_whose_brokers_are_gone_are_added_on_live_ones() -> None:
    added = assign_more_replicas({4: None, 5: None, 6: None}, {0: (1, 2)}, [1, 2, 3], Random(3))
    assert {broker_id for replicas in added.values() for broker_id in replicas} == {4, 5, 6}


@pytest.mark.parametrize("rack", [None, "a"])
def test_racks_count_only_if_every_broker_has_one(rack: str | None) -> None:
    racks = {1: rack, 2: "a", 3: "a", 4: "b"}
    assignment = assign_replicas(racks, 12, 2, Random(1))
    in_one_rack = [replicas for replicas in assignment.values() if 4 not in replicas]
    assert bool(in_one_rack) == (rack is None)
