"""The results that the function of a Processor returns."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from typing import Any, NamedTuple

from minibroker.client.errors import InvalidSetting
from minibroker.client.fetching.records import Record


class ProducerRecord(NamedTuple):
    """A record to produce. The fields are the arguments of `Producer.send`."""

    topic: str
    value: Any
    key: Any = None
    partition: int | None = None
    timestamp_ms: int | None = None
    headers: Sequence[tuple[str, bytes | None]] | None = None


Results = Iterable[ProducerRecord] | AsyncIterable[ProducerRecord] | Awaitable[Iterable[ProducerRecord] | None] | None
Process = Callable[[list[Record]], Results]
"""A function, a generator function, or either with `async`. None: there are no results."""


async def results_of(process: Process, records: list[Record]) -> list[ProducerRecord]:
    """Call the function and return its results. Raises its exceptions, and TypeError for other results."""
    returned = process(records)
    if isinstance(returned, AsyncIterable):
        return [checked(result) async for result in returned]
    return listed(await returned if inspect.isawaitable(returned) else returned)


def listed(returned: Iterable[ProducerRecord] | None) -> list[ProducerRecord]:
    """Raises TypeError."""
    if returned is None:
        return []
    if isinstance(returned, ProducerRecord) or not isinstance(returned, Iterable):
        raise TypeError(f"`process` has returned {returned!r}: return a list of ProducerRecord, or yield them")
    return [checked(result) for result in returned]


def checked(result: object) -> ProducerRecord:
    if not isinstance(result, ProducerRecord):
        raise TypeError(f"`process` has returned {result!r} as a result: return ProducerRecord(topic, value)")
    return result


def check_process(process: object) -> None:
    """Raises InvalidSetting."""
    if not callable(process):
        raise InvalidSetting("process", process, "give a function that takes a list of records and returns results")
