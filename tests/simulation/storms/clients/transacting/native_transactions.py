"""Our own transactional producer and read_committed consumer, with the calls of `KafkaTransactions`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Self

from minibroker.client.consumer import Consumer
from minibroker.client.errors import ClientCrashed, CommitOutcomeUnknown, ProducerFenced, TransactionAborted
from minibroker.client.producer import Producer
from minibroker.client.transactions.transaction import Transaction
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import World
from tests.simulation.storms.clients.transacting.kafka_transactions import Abortable, Fenced, Unanswered


class NativeTransactions:
    """A producer with a transactional id, and a consumer of some partitions. One call at a time."""

    def __init__(
        self,
        bootstrap: str,
        *,
        transactional_id: str,
        transaction_timeout_ms: int,
        partitions: list[TopicPartition],
        group: str,
        patience_s: float,
        world: World,
    ) -> None:
        patience_ms = patience_s * 1_000
        self._producer = Producer(
            bootstrap,
            transactional_id=transactional_id,
            transaction_timeout_ms=transaction_timeout_ms,
            delivery_timeout_ms=max(patience_ms, 6_000),
            request_timeout_ms=5_000,
            max_block_ms=patience_ms,
            world=world,
        )
        self._consumer = Consumer(
            bootstrap,
            group=group,
            partitions=partitions,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            default_api_timeout_ms=patience_ms,
            world=world,
        )
        self._partitions = partitions
        self._stack = AsyncExitStack()
        self._transaction: Transaction | None = None
        """The transaction whose block is open."""

    async def __aenter__(self) -> Self:
        await self._stack.enter_async_context(self._consumer)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def initialize(self) -> None:
        with _final():
            await self._stack.enter_async_context(self._producer)

    async def begin(self) -> None:
        with _final():
            transaction = self._producer.transaction()
            await transaction.__aenter__()
            self._transaction = transaction

    async def append(self, partition: TopicPartition, values: Sequence[bytes]) -> int:
        with _abortable():
            deliveries = [
                self._producer.send(partition.topic, value, partition=partition.partition) for value in values
            ]
            offsets = [(await delivery).offset for delivery in deliveries]
            is_one_batch = offsets == list(range(offsets[0], offsets[0] + len(offsets)))
            return offsets[0] if is_one_batch else -1

    async def send_offsets(self, group: str, offsets: Mapping[TopicPartition, int]) -> None:
        assert self._transaction is not None
        with _abortable():
            await self._transaction.send_offsets(offsets, self._consumer.group_metadata())

    async def commit(self) -> None:
        assert self._transaction is not None
        transaction, self._transaction = self._transaction, None
        try:
            await transaction.__aexit__(None, None, None)
        except CommitOutcomeUnknown:
            try:
                if not await transaction.was_committed():
                    raise Abortable("it was not committed, as was found out")
            except (CommitOutcomeUnknown, ProducerFenced) as unknown:
                raise Unanswered(str(unknown)) from unknown
        except ProducerFenced as fenced:
            error: MinibrokerError = (Unanswered if fenced.is_commit_unknown else Abortable)(str(fenced))
            raise error from fenced
        except ClientCrashed:
            raise
        except MinibrokerError as error:
            raise Abortable(str(error)) from error

    async def abort(self) -> None:
        transaction, self._transaction = self._transaction, None
        if transaction is not None:
            with _final(), suppress(TransactionAborted):  # it had failed before
                await transaction.__aexit__(Abortable, Abortable("changed its mind"), None)

    async def committed(self, group: str, partitions: Sequence[TopicPartition]) -> dict[TopicPartition, int]:
        with _final():
            found = await self._consumer.committed(*partitions)
        return {partition: -1 if (known := found[partition]) is None else known.offset for partition in partitions}

    def seek(self, partition: TopicPartition, offset: int) -> None:
        self._consumer.seek(partition, offset)

    async def positions(self) -> dict[TopicPartition, int]:
        with _abortable():
            return {partition: await self._consumer.position(partition) for partition in self._partitions}

    async def poll(self) -> list[tuple[TopicPartition, int, bytes]]:
        with _abortable():
            records = await self._consumer.poll(timeout_ms=100)
        return [
            (TopicPartition(record.topic, record.partition), record.offset, record.value or b"") for record in records
        ]


@contextmanager
def _abortable() -> Iterator[None]:
    try:
        yield
    except ClientCrashed:
        raise
    except MinibrokerError as error:
        raise Abortable(str(error)) from error


@contextmanager
def _final() -> Iterator[None]:
    """The instance ends: it was fenced, or did not get an answer in time."""
    try:
        yield
    except ClientCrashed:
        raise
    except ProducerFenced as error:
        raise Fenced(str(error)) from error
    except MinibrokerError as error:
        raise Unanswered(str(error)) from error
