"""The failovers in the controllers' timeline: where each begins and ends. `teller` tells its story. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from minibroker.client.administering.timeline import Entry
from minibroker.client.cli.timelines.story import Story
from minibroker.client.cli.timelines.teller import Teller
from minibroker.client.cli.timelines.turns import (
    SIGNS_WITHIN_MS,
    TOGETHER_MS,
    begins_anew,
    came_back,
    is_of_deposed,
    is_turn,
    stops_the_cluster,
    victims_of,
    was_whole_between,
)


def last_failover(entries: Sequence[Entry]) -> Story | None:
    """Tell the story of the last failover. None: none is recorded."""
    return next(_told_backwards(entries, None), None)


def failovers(entries: Sequence[Entry], topic: str | None = None) -> list[Story]:
    """Tell all recorded failovers, from merged entries, oldest first. With `topic`, they are the same, and tell of no
    partitions of other topics."""
    return [*_told_backwards(entries, topic)][::-1]


def of_topic(entries: Sequence[Entry], topic: str) -> list[Entry]:
    """Return the entries without the partitions of other topics, and without the number of omitted partitions, whose
    topics are not known."""
    return [
        {key: value for key, value in entry.items() if key != "states_omitted"}
        | {
            kind: [state for state in entry[kind] if state["partition"].rpartition("-")[0] == topic]
            for kind in ("states", "adopted")
            if kind in entry
        }
        for entry in entries
    ]


def _told_backwards(entries: Sequence[Entry], topic: str | None) -> Iterator[Story]:
    shown = entries if topic is None else of_topic(entries, topic)
    starts = [index for index in range(len(entries)) if begins_anew(entries, index)]
    for start in reversed([0, *starts]):
        yield from _told_since_start(entries[start:], shown[start:], is_start_known=start > 0)
        entries, shown = entries[:start], shown[:start]


def _told_since_start(entries: Sequence[Entry], shown: Sequence[Entry], is_start_known: bool) -> Iterator[Story]:
    """`shown` are the same entries, perhaps with the partitions of one topic alone."""
    turns = [
        index
        for index in range(1 if is_start_known else 0, len(entries))
        if is_turn(entries[index]) and not is_of_deposed(entries, index)
    ]
    while turns:
        chosen = [turns.pop()]
        victims = victims_of(entries, chosen[0])
        while turns and not was_whole_between(entries, turns[-1], chosen[0]):
            index = turns[-1]
            distance_ms = entries[chosen[0]]["time_ms"] - entries[index]["time_ms"]
            before = victims_of(entries, index)
            same = victims & before - came_back(entries, index, chosen[0])
            if distance_ms > (SIGNS_WITHIN_MS if same else TOGETHER_MS):
                break
            chosen.insert(0, turns.pop())
            victims |= before
        teller = Teller(shown, chosen, victims, turns[-1] if turns else -1, entries[chosen[0]])
        if not stops_the_cluster(entries, chosen[-1], teller.first, victims):
            yield teller.story()
        # Earlier stories end before this one begins.
        entries, shown = entries[: teller.first], shown[: teller.first]
