"""What the controllers did: the timelines of all brokers, merged (DescribeTimeline at each broker).

Each broker records what its own controller does, from the moment it tries to replace another one. The merged timeline
is in the order of the controller epochs, which is certain. Within an epoch, entries of different brokers are in the
order of the brokers' clocks, which differ; entries of one broker stay in their order, even if its clock was set back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from minibroker.client.administering.requests import AdminRequests
from minibroker.client.cluster.calls import Calls, ends_with_its_client
from minibroker.client.cluster.connections import Purpose
from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.settings import Address
from minibroker.protocol import messages as m
from minibroker.protocol.apis import DESCRIBE_TIMELINE
from minibroker.protocol.errors import BrokerError, InvalidMessage, MinibrokerError, NetworkError

ANSWER_WITHIN_S = 3.0
"""A broker that hangs must not delay the answers of the others."""
ASK_AGAIN_AFTER_S = 5.0

Entry = dict[str, Any]


class TimelineRead(NamedTuple):
    entries: tuple[Entry, ...]
    """All entries, oldest first. `docs/timeline.md` describes them."""
    errors: Mapping[int, MinibrokerError]
    """Brokers that did not answer, and whose entries are missing, by id."""


class _Recorded(msgspec.Struct):
    """The fields of every entry."""

    number: int
    time_ms: int
    epoch: int
    controller: int
    event: str
    cause: str


def merged(by_broker: Mapping[int, Sequence[Entry]]) -> list[Entry]:
    """Return the entries of all brokers in order of epoch, then of clock; those of a broker keep their order."""
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
    """Reads the timelines of all brokers, and then what is new in them, through an admin client."""

    def __init__(
        self,
        requests: Callable[[], AdminRequests],
        since_ms: int,
        calls: Calls,
        not_running: Callable[[], MinibrokerError],
    ) -> None:
        """`requests` raises Closed or WrongEventLoop if the client cannot be used. `calls` are those of the client, and
        `not_running` returns why they have ended."""
        self._requests = requests
        self._calls = calls
        self._not_running = not_running
        self._since_ms = since_ms
        self.answer_within_s = ANSWER_WITHIN_S
        """A broker that does not answer in time is left out for the next five seconds."""
        self._read_up_to: dict[int, int] = {}
        self._failed: dict[int, tuple[float, MinibrokerError]] = {}
        """For each broker that did not answer last time: when it is asked again, and the error."""
        self._replicas: set[int] | None = None
        """The brokers that had replicas at the first `read`."""

    @ends_with_its_client
    async def read(self) -> TimelineRead:
        """Return the entries that are new since the last call, of the brokers that answer. Raises NetworkError if none
        does, Closed if the client is not running."""
        requests = self._requests()
        clock = requests.runtime.clock
        response = await requests.metadata(None if self._replicas is None else [])
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
            *(self._within(self._entries_of(requests.runtime, broker_id, alive[broker_id])) for broker_id in asked)
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
            async with asyncio.timeout(self.answer_within_s):
                return await answer
        except TimeoutError:
            return NetworkError(f"it did not answer within {self.answer_within_s:g} s")
        except (NetworkError, BrokerError, InvalidMessage) as error:
            return error

    async def _entries_of(self, runtime: ClientRuntime, broker_id: int, address: Address) -> list[Entry]:
        entries: list[Entry] = []
        while True:
            connection = await runtime.connections.open(address, Purpose.REQUESTS)
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
