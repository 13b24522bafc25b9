"""A transactional producer with a read_committed consumer that speak Kafka's protocol, reduced for the storms.

Two kinds of versions matter. A client that *raises* follows the second part of KIP-890: partitions join a transaction
by being written to, and each end of a transaction gives it a new epoch. An older client names the partitions first and
keeps its epoch, so the cluster cannot tell a request of its last transaction from one of the present one. Here it gets
a new epoch (InitProducerId, KIP-360) if it has not seen the answer to each of its requests, and its late requests are
refused, too.

Calls are retried until they have a final answer or the patience is over (`Unanswered`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

from minibroker.deploy.simulator.kafka_clients import (
    BACKOFF_S,
    READ_COMMITTED,
    KafkaConsumer,
    Links,
    ProtocolBroken,
    Unreachable,
    Versions,
)
from minibroker.protocol import messages as m
from minibroker.protocol.errors import ERRORS, ErrorCode, MinibrokerError
from minibroker.protocol.kafka import data, groups, metadata, transactions
from minibroker.protocol.kafka.schema import KafkaApi
from minibroker.protocol.messages import groups as g
from minibroker.protocol.messages import transactions as t
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import MAGIC_RECORDS, encode_batch
from minibroker.protocol.world import World

GROUP_KEY, TRANSACTION_KEY = 0, 1


class Unanswered(MinibrokerError):
    """No final answer came in time. The request may have been carried out."""


class Abortable(MinibrokerError):
    """The transaction can only be aborted."""


class Fenced(MinibrokerError):
    """Another producer has the transactional id, or this one was forgotten."""


class TransactionVersions(NamedTuple):
    """The version of each API that a client uses; -1 if it does not use it."""

    data: Versions
    find_coordinator: int
    init_producer_id: int
    add_partitions: int
    add_offsets: int
    end: int
    txn_offset_commit: int
    offset_fetch: int

    @property
    def raises_epoch(self) -> bool:
        return self.end >= 5


OLDER = (
    TransactionVersions(Versions(7, 8, 11, 3), 2, 3, 1, 1, 1, 2, 7),
    TransactionVersions(Versions(12, 11, 17, 4), 4, 4, 3, 3, 4, 4, 8),
)
RAISING = (TransactionVersions(Versions(12, 12, 17, 4), 4, 5, -1, -1, 5, 5, 9),)

_COORDINATOR_MOVED = frozenset({ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_NOT_AVAILABLE})
REFUSALS = frozenset(
    {
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        ErrorCode.GROUP_AUTHORIZATION_FAILED,
        ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)
_AGAIN = frozenset(
    {
        ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.UNSTABLE_OFFSET_COMMIT,
        *_COORDINATOR_MOVED,
    }
)


class KafkaTransactions:
    """A producer with a transactional id, and a consumer of some partitions. One call at a time."""

    def __init__(
        self,
        bootstrap: str,
        *,
        transactional_id: str,
        transaction_timeout_ms: int,
        partitions: list[TopicPartition],
        versions: TransactionVersions,
        patience_s: float,
        world: World,
    ) -> None:
        self._bootstrap = bootstrap
        self._partitions = partitions
        self._links = Links(bootstrap, world, versions.data)
        self._consumer = KafkaConsumer(
            bootstrap,
            partitions=partitions,
            versions=versions.data,
            world=world,
            isolation_level=READ_COMMITTED,
            fetch_max_wait_ms=100,
        )
        self._transactional_id = transactional_id
        self._timeout_ms = transaction_timeout_ms
        self._versions = versions
        self._patience_s = patience_s
        self._world = world
        self._producer_id, self._epoch = -1, -1
        self._sequences: dict[TopicPartition, int] = {}
        self._joined: set[TopicPartition] = set()
        self._groups: set[str] = set()
        self._is_doubtful = False
        """A request since the last new epoch may still be under way."""
        self._coordinators: dict[tuple[int, str], int] = {}
        self.unanswered = 0
        """Attempts that may have been carried out, or may still be: nobody answered, or a coordinator that moved."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._links.close()
        await self._consumer.__aexit__()

    def copied(self) -> KafkaTransactions:
        """Return a client that sends what this one would send now: later, it stands for requests that arrive late."""
        copy = KafkaTransactions(
            self._bootstrap,
            transactional_id=self._transactional_id,
            transaction_timeout_ms=self._timeout_ms,
            partitions=self._partitions,
            versions=self._versions,
            patience_s=self._patience_s,
            world=self._world,
        )
        copy._producer_id, copy._epoch = self._producer_id, self._epoch
        copy._sequences |= self._sequences
        copy._joined |= self._joined
        copy._groups |= self._groups
        return copy

    # -- the producer --

    @property
    def producer_id(self) -> int:
        return self._producer_id

    @property
    def epoch(self) -> int:
        return self._epoch

    async def initialize(self) -> None:
        """Fence all earlier producers of the transactional id."""
        await self._initialize(-1, -1)

    async def begin(self) -> None:
        """A transaction begins with its first request."""

    async def _initialize(self, producer_id: int, epoch: int) -> None:
        request = m.InitProducerIdRequest(self._transactional_id, self._timeout_ms, producer_id, epoch)
        answer, code = await self._ask_coordinator(
            data.INIT_PRODUCER_ID, self._versions.init_producer_id, request, lambda answer: [answer.error_code]
        )
        if code is not ErrorCode.NONE:
            raise Fenced(f"InitProducerId of {self._transactional_id}: {code.name}")
        self._goes_on_with(answer.producer_id, answer.producer_epoch)
        self._is_doubtful = False

    def _goes_on_with(self, producer_id: int, epoch: int) -> None:
        if (producer_id, epoch) != (self._producer_id, self._epoch):
            self._producer_id, self._epoch = producer_id, epoch
            self._sequences.clear()
        self._joined.clear()
        self._groups.clear()

    async def append(self, partition: TopicPartition, values: Sequence[bytes]) -> int:
        """Append one batch, and return the offset of its first record, -1 if the broker has forgotten it."""
        with self._abortable():
            if self._versions.add_partitions >= 0 and partition not in self._joined:
                await self._add_partition(partition)
            return await self._produce(partition, values)

    async def _add_partition(self, partition: TopicPartition) -> None:
        topics = [t.TransactionTopic(partition.topic, [partition.partition])]
        wire: Any = transactions.ADD_PARTITIONS_TO_TXN.request.cls
        request = wire([], self._transactional_id, self._producer_id, self._epoch, topics)

        def codes(answer: Any) -> Iterable[int]:
            return [p.error_code for topic in answer.results_by_topic_v3_and_below for p in topic.results_by_partition]

        api, version = transactions.ADD_PARTITIONS_TO_TXN, self._versions.add_partitions
        _, code = await self._ask_coordinator(api, version, request, codes)
        _check(code, f"AddPartitionsToTxn of {partition}")
        self._joined.add(partition)

    async def _produce(self, partition: TopicPartition, values: Sequence[bytes]) -> int:
        sequence = self._sequences.get(partition, 0)
        records = encode_batch(
            values,
            base_timestamp=self._world.clock.wall_ms(),
            producer_id=self._producer_id,
            producer_epoch=self._epoch,
            base_sequence=sequence,
            transactional=True,
            magic=MAGIC_RECORDS,
        )
        part = m.ProducePartition(partition.partition, memoryview(records))
        request = m.ProduceRequest(self._transactional_id, -1, 5_000, [m.ProduceTopic(partition.topic, [part])])
        async for _ in self._attempts(f"Produce to {partition}"):
            try:
                leader = await self._links.leader(partition)
                answer = await self._links.request(leader.node_id, data.PRODUCE, self._versions.data.produce, request)
            except Unreachable:
                self._unanswered()
                self._links.forget(partition)
                continue
            [[told]] = [topic.partition_responses for topic in answer.responses]
            code = ErrorCode(told.error_code)
            if code in (ErrorCode.NONE, ErrorCode.DUPLICATE_SEQUENCE_NUMBER):
                self._sequences[partition] = sequence + len(values)
                self._joined.add(partition)
                return -1 if code is not ErrorCode.NONE else told.base_offset
            if not ERRORS[code].retriable:
                raise Abortable(f"Produce to {partition}: {code.name}")
            self._links.forget(partition)
        raise AssertionError

    async def send_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        """Commit the group's offsets with the transaction."""
        with self._abortable():
            if self._versions.add_offsets >= 0 and group not in self._groups:
                added = t.AddOffsetsToTxnRequest(self._transactional_id, self._producer_id, self._epoch, group)
                api, version = transactions.ADD_OFFSETS_TO_TXN, self._versions.add_offsets
                _, code = await self._ask_coordinator(api, version, added, lambda answer: [answer.error_code])
                _check(code, f"AddOffsetsToTxn of {group}")
            topics: dict[str, list[t.TxnOffsetCommitPartition]] = {}
            for partition, offset in offsets.items():
                of_topic = topics.setdefault(partition.topic, [])
                of_topic.append(t.TxnOffsetCommitPartition(partition.partition, offset))
            request = t.TxnOffsetCommitRequest(
                self._transactional_id,
                group,
                self._producer_id,
                self._epoch,
                [t.TxnOffsetCommitTopic(topic, partitions) for topic, partitions in topics.items()],
            )

            def codes(answer: Any) -> Iterable[int]:
                return [part.error_code for topic in answer.topics for part in topic.partitions]

            api, version = transactions.TXN_OFFSET_COMMIT, self._versions.txn_offset_commit
            _, code = await self._ask(GROUP_KEY, group, api, version, request, codes)
            _check(code, f"TxnOffsetCommit of {group}")
            self._groups.add(group)

    async def commit(self) -> None:
        """Raise Abortable or Fenced if the transaction is not committed, Unanswered if that is unknown."""
        before = self.unanswered
        code = await self._end(committed=True)
        if code is ErrorCode.NONE:
            await self._after_the_end()
        elif self.unanswered > before:
            raise Unanswered(f"EndTxn of {self._transactional_id}: {code.name}, after an attempt without an answer")
        else:
            raise Abortable(f"EndTxn of {self._transactional_id}: {code.name}")

    async def abort(self) -> None:
        """Abort the transaction. Raise Fenced, or Unanswered."""
        if await self._end(committed=False) is ErrorCode.NONE:
            await self._after_the_end()
        else:
            await self._initialize(self._producer_id, self._epoch)

    async def _end(self, *, committed: bool) -> ErrorCode:
        if not self._versions.raises_epoch and not self._joined and not self._groups:
            return ErrorCode.NONE
        request = t.EndTxnRequest(self._transactional_id, self._producer_id, self._epoch, committed)
        api, version = transactions.END_TXN, self._versions.end
        answer, code = await self._ask_coordinator(api, version, request, lambda answer: [answer.error_code])
        if code is ErrorCode.NONE and self._versions.raises_epoch:
            self._goes_on_with(answer.producer_id, answer.producer_epoch)
            self._is_doubtful = False
        return code

    async def _after_the_end(self) -> None:
        self._joined.clear()
        self._groups.clear()
        if self._is_doubtful:
            await self._initialize(self._producer_id, self._epoch)

    @contextmanager
    def _abortable(self) -> Iterator[None]:
        try:
            yield
        except Unanswered as error:
            raise Abortable(str(error)) from error
        except Abortable:
            self._is_doubtful = True
            raise

    # -- the consumer --

    async def committed(self, group: str, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the group's offsets, -1 where it has none, once no transaction is about to change them."""
        topics: dict[str, list[int]] = {}
        for partition in partitions:
            topics.setdefault(partition.topic, []).append(partition.partition)
        wanted = [g.OffsetFetchTopic(topic, indexes) for topic, indexes in topics.items()]
        wire: Any = groups.OFFSET_FETCH.request.cls
        version = self._versions.offset_fetch
        request = wire(group, wanted, [g.OffsetFetchGroup(group, wanted)], True)

        def topics_of(answer: Any) -> Any:
            return answer.groups[0].topics if version >= 8 else answer.topics

        def codes(answer: Any) -> Iterable[int]:
            of_group = answer.groups[0].error_code if version >= 8 else answer.error_code
            return [of_group, *(part.error_code for topic in topics_of(answer) for part in topic.partitions)]

        answer, code = await self._ask(GROUP_KEY, group, groups.OFFSET_FETCH, version, request, codes)
        if code in REFUSALS:
            raise Unanswered(f"OffsetFetch of {group}: {code.name}")
        if code is not ErrorCode.NONE:
            raise ProtocolBroken(f"OffsetFetch of {group}: {code.name}")
        return {
            TopicPartition(topic.name, part.partition_index): part.committed_offset
            for topic in topics_of(answer)
            for part in topic.partitions
        }

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._consumer.seek(partition, offset)

    async def positions(self) -> dict[TopicPartition, int]:
        return {partition: self._consumer.position(partition) for partition in self._partitions}

    async def poll(self) -> list[tuple[TopicPartition, int, bytes]]:
        return [
            (TopicPartition(batch.topic, batch.partition), offset, value or b"")
            for batch in await self._consumer.poll()
            for offset, value in zip(batch.offsets, batch.values, strict=True)
        ]

    # -- requests --

    async def _ask_coordinator(
        self, api: KafkaApi, version: int, wire: Any, codes: Callable[[Any], Iterable[int]]
    ) -> tuple[Any, ErrorCode]:
        return await self._ask(TRANSACTION_KEY, self._transactional_id, api, version, wire, codes)

    async def _ask(
        self, key_type: int, key: str, api: KafkaApi, version: int, wire: Any, codes: Callable[[Any], Iterable[int]]
    ) -> tuple[Any, ErrorCode]:
        """Return the first final answer of the coordinator, and its error code. Raise Unanswered."""
        async for _ in self._attempts(f"{api.name} of {key}"):
            try:
                node_id = await self._coordinator(key_type, key)
            except Unreachable:
                continue
            try:
                answer = await self._links.request(node_id, api, version, wire)
            except Unreachable:
                self._unanswered()
                self._coordinators.pop((key_type, key), None)
                continue
            failed = [code for code in map(ErrorCode, codes(answer)) if code is not ErrorCode.NONE]
            final = [code for code in failed if code not in _AGAIN and not ERRORS[code].retriable]
            if not failed or final:
                return answer, (final[0] if final else ErrorCode.NONE)
            if _COORDINATOR_MOVED.intersection(failed):
                self.unanswered += 1  # it may have failed during its write, which may survive it
                self._coordinators.pop((key_type, key), None)
        raise AssertionError

    async def _attempts(self, what: str) -> AsyncIterator[None]:
        """Iterate until the patience is over, with pauses. Then raise Unanswered."""
        until_s = self._world.clock.monotonic() + self._patience_s
        while self._world.clock.monotonic() < until_s:
            yield
            await asyncio.sleep(BACKOFF_S)
        raise Unanswered(f"{what}: no final answer within {self._patience_s:g} s")

    def _unanswered(self) -> None:
        self.unanswered += 1
        self._is_doubtful = True

    async def _coordinator(self, key_type: int, key: str) -> int:
        known = self._coordinators.get((key_type, key))
        if known is not None:
            return known
        node_id = self._world.random.choice(self._links.bootstrap)
        wire: Any = metadata.FIND_COORDINATOR.request.cls
        version = self._versions.find_coordinator
        answer = await self._links.request(
            node_id, metadata.FIND_COORDINATOR, version, wire(key, key_type, [key] if version >= 4 else [])
        )
        found = answer.coordinators[0] if version >= 4 else answer
        code = ErrorCode(found.error_code)
        if code is not ErrorCode.NONE:
            if not ERRORS[code].retriable and code not in REFUSALS:
                raise ProtocolBroken(f"FindCoordinator of {key}: {code.name}")
            raise Unreachable(f"FindCoordinator of {key}: {code.name}")
        self._links.addresses[found.node_id] = (found.host, found.port)
        self._coordinators[key_type, key] = found.node_id
        return int(found.node_id)


def _check(code: ErrorCode, what: str) -> None:
    if code is not ErrorCode.NONE:
        raise Abortable(f"{what}: {code.name}")
