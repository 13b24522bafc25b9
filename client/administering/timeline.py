"""What controllers did: the timelines of all brokers, read one by one and merged.

Each broker has recorded what its own controller did while it was in office, and what it did to replace another one. The
order of the whole is that of the controller epochs, which is certain; within an epoch it goes by the brokers' clocks,
which differ. What one broker has recorded stays in its order, whatever its clock did meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from minibroker.client.cluster.connections import Purpose
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.settings import Address
from minibroker.protocol import messages as m
from minibroker.protocol.apis import DESCRIBE_TIMELINE
from minibroker.protocol.errors import BrokerError, InvalidMessage, MinibrokerError, NetworkError

ANSWER_WITHIN_S = 3.0
"""A broker that hangs must not hold up what the others say."""
ASK_AGAIN_AFTER_S = 5.0

Entry = dict[str, Any]


class TimelineRead(NamedTuple):
    entries: tuple[Entry, ...]
    """Merged, oldest first. What is in them: `docs/timeline.md`."""
    errors: Mapping[int, MinibrokerError]
    """Brokers that should be there, and did not answer: what they have recorded is missing."""


class _Recorded(msgspec.Struct):
    """What every entry has."""

    number: int
    time_ms: int
    epoch: int
    controller: int
    event: str
    cause: str


def merged(by_broker: Mapping[int, Sequence[Entry]]) -> list[Entry]:
    """In the order of the epochs, then of the clocks; each broker's in the order in which it recorded them."""
    keyed = []
    for broker_id, entries in by_broker.items():
        latest_ms: dict[int, int] = {}
        for entry in entries:
            epoch = entry["epoch"]
            latest_ms[epoch] = max(latest_ms.get(epoch, 0), entry["time_ms"])
            keyed.append(((epoch, latest_ms[epoch], broker_id, entry["number"]), entry))
    keyed.sort(key=lambda pair: pair[0])
    return [entry for _, entry in keyed]


def decode_entry(data: m.Buffer) -> Entry:
    """Raises InvalidMessage."""
    try:
        msgspec.json.decode(data, type=_Recorded)
        entry: Entry = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidMessage(f"not an entry of a timeline: {error}") from error
    return entry


class TimelineReader:
    """Reads what is new in the timelines of all brokers, again and again. Belongs to an admin client."""

    def __init__(
        self,
        runtime: ClientRuntime,
        metadata: Callable[[list[str] | None], Awaitable[m.MetadataResponse]],
        since_ms: int,
    ) -> None:
        """`metadata` asks any broker about topics; None: about all."""
        self._runtime = runtime
        self._metadata = metadata
        self._since_ms = since_ms
        self._read_up_to: dict[int, int] = {}
        self._failed: dict[int, tuple[float, MinibrokerError]] = {}
        """Brokers that did not answer when they were asked last: until when they are left alone, and why."""
        self._replicas: set[int] | None = None
        """Brokers that have replicas, as of the first look."""

    async def read(self) -> TimelineRead:
        """What the brokers that answer have recorded since the last call. Raises NetworkError where none does."""
        clock = self._runtime.clock
        response = await self._metadata(None if self._replicas is None else [])
        if self._replicas is None:
            self._replicas = {b for t in response.topics for p in t.partitions for b in p.replica_nodes}
        alive = {broker.node_id: Address(broker.host, broker.port) for broker in response.brokers}
        errors: dict[int, MinibrokerError] = {
            broker_id: NetworkError("it is not alive, and its timeline can be read when it is back")
            for broker_id in sorted(self._replicas.union(self._read_up_to) - set(alive))
        }
        self._failed = {b: failed for b, failed in self._failed.items() if b in alive and failed[0] > clock.monotonic()}
        errors |= {broker_id: error for broker_id, (_, error) in self._failed.items()}
        asked = [broker_id for broker_id in sorted(alive) if broker_id not in self._failed]
        answers = await asyncio.gather(
            *(self._within(self._entries_of(broker_id, alive[broker_id])) for broker_id in asked)
        )
        found: dict[int, Sequence[Entry]] = {}
        for broker_id, answer in zip(asked, answers, strict=True):
            if isinstance(answer, MinibrokerError):
                errors[broker_id] = answer
                self._failed[broker_id] = clock.monotonic() + ASK_AGAIN_AFTER_S, answer
            else:
                found[broker_id] = answer
        return TimelineRead(tuple(merged(found)), errors)

    async def _within(self, answer: Awaitable[list[Entry]]) -> list[Entry] | MinibrokerError:
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                return await answer
        except TimeoutError:
            return NetworkError(f"it did not answer within {ANSWER_WITHIN_S:g} s")
        except (NetworkError, BrokerError, InvalidMessage) as error:
            return error

    async def _entries_of(self, broker_id: int, address: Address) -> list[Entry]:
        entries: list[Entry] = []
        while True:
            connection = await self._runtime.connections.open(address, Purpose.REQUESTS)
            up_to = entries[-1]["number"] if entries else self._read_up_to.get(broker_id, 0)
            response = await connection.request(
                DESCRIBE_TIMELINE, m.DescribeTimelineRequest(up_to, self._since_ms), timeout_s=ANSWER_WITHIN_S
            )
            if response.last_number < up_to:  # its disk was replaced: it counts from the beginning
                self._read_up_to[broker_id] = 0
                return entries
            entries += [decode_entry(entry) for entry in response.entries]
            if response.is_complete or not response.entries:
                self._read_up_to[broker_id] = entries[-1]["number"] if entries else up_to
                return entries
