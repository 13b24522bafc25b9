"""Read-process-write, exactly once: consumes in a group, calls the user's function, produces its results, and commits
the offsets in the same transaction (Kafka Streams' `exactly_once_v2`, KIP-447).

The problem: each part exists in the consumer and the producer, but there are many ways to join them wrongly. Positions
stay behind records whose transaction was aborted, so these are skipped (KAFKA-17582). A commit that was not answered
is repeated although it was carried out. A member commits offsets of partitions that it has lost.

The choice:

- The function runs before the transaction begins. So a transaction lasts for one round of requests, however slow the
  function is, and readers of the results do not wait for it.
- A batch is pending from the moment in which its records are handed out until its transaction is known to be committed.
  While a batch is pending, no other is begun. First the outcome of its transaction is learned; unless it is committed,
  its partitions go back to the committed offsets of the group. Every failure leads there, and a restart, too.
- The consumer gives up partitions only while its user asks for records, and a Processor asks only without a pending
  batch. So a rebalance waits for the transaction. A member that the group has removed meanwhile gets no group metadata,
  or the coordinator refuses its generation; the transaction is aborted then. It goes back to committed offsets only in
  partitions that it still has. Partitions that it gets later begin there in any case.

Rejected: a transaction around the function, which could then send by itself. It would end with the time-out of the
transaction, hold up readers, and leave open which results belong to which input.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Literal, Unpack

from minibroker.client.cluster.calls import ends_with_its_client
from minibroker.client.cluster.lifecycle import Client
from minibroker.client.cluster.retries import exponential_backoff_s
from minibroker.client.consumer import Consumer
from minibroker.client.errors import InvalidSetting, InvalidTransactionState, may_pass
from minibroker.client.fetching.records import Record
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.client.log import Logger
from minibroker.client.other_names import arguments_of, knows_other_names, meant
from minibroker.client.processing.results import Process, ProducerRecord, check_process, results_of
from minibroker.client.producer import Producer
from minibroker.client.security import Security
from minibroker.client.serializers import DeserializerChoice, SerializerChoice
from minibroker.client.settings import IsolationLevel, check_ms, check_whole_ms
from minibroker.client.transactions.transaction import Transaction
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import counted
from minibroker.protocol.world import World

logger = Logger("minibroker.client")

POLL_MS = 1_000


class _Batch:
    """Records that were handed out, until their transaction is known to be committed."""

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.first: dict[TopicPartition, int] = {}
        """The first offset of each partition."""
        for record in records:
            self.first.setdefault(TopicPartition(record.topic, record.partition), record.offset)
        self.positions: dict[TopicPartition, OffsetAndMetadata] = {}
        self.transaction: Transaction | None = None


class Processor(Client):
    """Consumes topics in a group, passes the records to a function, and produces its results, exactly once:

        async with Processor("host:9092", topics=["orders"], group="billing", transactional_id="billing-1",
                             process=bill) as processor:
            await processor.run()

    `process` is called with the records of one poll, and returns a list of ProducerRecord, or yields them. It may be a
    plain function, a generator, or either with `async`. A plain function holds up the event loop, but no heartbeats.
    After it has returned, its results and the offsets of its records are committed in one transaction.

    Guarantees: for readers with `isolation_level="read_committed"`, the results of each record are there once, together
    with the group's offset behind it, whatever fails and however often. `process` itself may be called several times
    for a record, and only the results of the last call count. Its other effects, such as a row in a database, are not
    part of the transaction.

    Run more instances with the same `group` to share the partitions. Each needs a `transactional_id` of its own, which
    stays the same when it is started again: the new instance then ends the transaction that the previous one has left
    open, and fences the previous one if it is still alive. With a new id after each start, the records of that
    transaction hold up readers until `transaction_timeout_ms`. Two running instances with one id fence each other:
    the earlier one raises ProducerFenced. The default is the group and the `group_instance_id`, which follow the same
    rules.

    After a transaction was aborted, the batch is repeated from the committed offsets of the group; in a partition
    without one, from its first record. `run` repeats batches on its own, with a WARNING, after failovers, rebalances,
    time-outs and commits without an answer, whose outcome it first asks for. It raises the exceptions of `process`, and
    errors that repeating does not end, such as ProducerFenced, SerializationFailed or a topic that does not exist.
    Nothing of the batch is committed then. `run` may be called again, and begins with the same records.

    Settings, beside those of Consumer and Producer:

    - `isolation_level`: "read_committed" by default, so that input of aborted transactions is not processed.
    - `max_poll_records`: the most records of a transaction.
    - `commit_interval_ms`: transactions begin at least this long after each other. A longer interval makes larger, so
      cheaper, transactions. 0: each poll's records are a transaction.
    - `consumer_settings`, `producer_settings`: further arguments of the Consumer and the Producer.

    The constructor raises InvalidSetting.
    """

    _noun = "processor"

    @knows_other_names
    def __init__(
        self,
        bootstrap: str | Sequence[str],
        *,
        process: Process,
        group: str,
        topics: Sequence[str] | None = None,
        pattern: str | re.Pattern[str] | None = None,
        transactional_id: str | None = None,
        group_instance_id: str | None = None,
        isolation_level: IsolationLevel = "read_committed",
        auto_offset_reset: Literal["earliest", "latest", "none"] = "earliest",
        max_poll_records: int = 500,
        commit_interval_ms: float = 0,
        transaction_timeout_ms: float = 60_000,
        key_deserializer: DeserializerChoice = "bytes",
        value_deserializer: DeserializerChoice = "bytes",
        key_serializer: SerializerChoice = "bytes",
        value_serializer: SerializerChoice = "bytes",
        client_id: str = "minibroker-processor",
        request_timeout_ms: float = 30_000,
        retry_backoff_ms: float = 100,
        metadata_max_age_ms: float = 30_000,
        consumer_settings: Mapping[str, Any] | None = None,
        producer_settings: Mapping[str, Any] | None = None,
        world: World | None = None,
        **security: Unpack[Security],
    ) -> None:
        check_process(process)
        if not isinstance(group, str) or not group:
            raise InvalidSetting("group", group, 'give the name of the group whose offsets are committed: group="name"')
        self._process = process
        self._commit_interval_s = check_ms("commit_interval_ms", commit_interval_ms)
        self._transaction_timeout_s = check_whole_ms("transaction_timeout_ms", transaction_timeout_ms, lowest=1)
        if transactional_id is None:
            if group_instance_id is None:
                rule = "give each instance a name of its own that stays the same when it is started again"
                raise InvalidSetting("transactional_id", None, rule)
            transactional_id = f"{group}-{group_instance_id}"
        if topics is None and pattern is None:
            raise InvalidSetting("topics", None, "give the topics to read, or pattern")
        common: dict[str, Any] = {
            "client_id": client_id,
            "request_timeout_ms": request_timeout_ms,
            "retry_backoff_ms": retry_backoff_ms,
            "metadata_max_age_ms": metadata_max_age_ms,
            "world": world,
            **security,
        }
        for_consumer = common | {
            "topics": topics,
            "pattern": pattern,
            "group": group,
            "group_instance_id": group_instance_id,
            "isolation_level": isolation_level,
            "auto_offset_reset": auto_offset_reset,
            "max_poll_records": max_poll_records,
            "key_deserializer": key_deserializer,
            "value_deserializer": value_deserializer,
        }
        for_producer = common | {
            "transactional_id": transactional_id,
            "transaction_timeout_ms": transaction_timeout_ms,
            "key_serializer": key_serializer,
            "value_serializer": value_serializer,
        }
        more_for_consumer = _further("consumer_settings", consumer_settings, Consumer, for_consumer, _OURS_OF_CONSUMER)
        more_for_producer = _further("producer_settings", producer_settings, Producer, for_producer, {})
        self._consumer = Consumer(bootstrap, **for_consumer, **more_for_consumer)
        self._producer = Producer(bootstrap, **for_producer, **more_for_producer)
        super().__init__(
            bootstrap,
            client_id=client_id,
            request_timeout_ms=request_timeout_ms,
            retry_backoff_ms=retry_backoff_ms,
            metadata_max_age_ms=metadata_max_age_ms,
            world=world,
            security=security,
        )
        self._clients = AsyncExitStack()
        self._pending: _Batch | None = None
        self._unfinished: tuple[TopicPartition, ...] = ()
        """The partitions of the last batch, until a batch is committed."""
        self._failures = 0
        """Batches that have failed since the last commit."""
        self._polled_at: float | None = None
        """When the last batch was handed out."""
        self._is_running = False
        self._must_stop = False
        self._stopped_at = 0.0
        self._waiting: asyncio.Timeout | None = None
        """The limit of a wait that `stop` ends."""

    # -- life --

    async def start(self) -> None:
        """Reach a broker, get the transactional id, and join the group. The previous instance with that id is fenced,
        and its transaction ended. Raises as the `start` of Producer and Consumer."""
        await super().start()

    async def _reach(self) -> None:
        try:
            # The producer first: the group's offsets are then those of finished transactions.
            await self._clients.enter_async_context(self._producer)
            await self._clients.enter_async_context(self._consumer)
        except BaseException:
            await self._clients.aclose()
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._clients.__aexit__(kind, error, traceback)
        finally:
            await super().__aexit__(kind, error, traceback)

    async def close(self) -> None:
        """Leave the group, abort an open transaction, and end all tasks and connections. A `run` that is under way
        raises Closed; call `stop` before, and wait for `run`, so that its batch is committed."""
        try:
            await self._clients.aclose()
        finally:
            await super().close()

    # -- running --

    @ends_with_its_client
    async def run(self) -> None:
        """Process records until `stop` is called. Raises the exceptions of `process`, Closed, ProducerFenced, and
        errors of the consumer and producer that do not pass. If this is cancelled, the open transaction is aborted."""
        self._check_running()
        if self._is_running:
            raise InvalidTransactionState("run() of this processor is under way already: make one processor for each")
        self._is_running, self._unfinished = True, ()
        try:
            while not self._must_stop or self._has_to_repeat():
                await self._step()
        finally:
            self._is_running = self._must_stop = False

    def stop(self) -> None:
        """Let `run` return once the records in hand are processed and committed. If their transaction fails, they are
        repeated first, for about `transaction_timeout_ms`, unless the group has given their partitions to another
        member. May be called by `process`, and by a signal handler of the event loop."""
        self._must_stop = True
        self._stopped_at = self._runtime.clock.monotonic()
        if self._waiting is not None:
            self._waiting.reschedule(0)

    def _has_to_repeat(self) -> bool:
        if self._runtime.clock.monotonic() > self._stopped_at + self._transaction_timeout_s:
            return False
        assigned = self._consumer.assignment() if self._unfinished else []
        return any(partition in assigned for partition in self._unfinished)

    async def _step(self) -> None:
        """Process one batch."""
        try:
            await self._settle()
            records = await self._next_records()
        except MinibrokerError as error:
            await self._pause(error)
            return
        if not records:
            return
        batch = self._pending = _Batch(records)
        self._unfinished = tuple(batch.first)
        batch.positions = {partition: await self._position(partition) for partition in batch.first}
        results = await results_of(self._process, records)
        try:
            await self._commit(batch, results)
        except MinibrokerError as error:
            await self._pause(error)
            return
        self._committed()

    async def _next_records(self) -> list[Record]:
        """Return no records if the processor is stopped."""
        now = self._runtime.clock.monotonic()
        early_s = 0.0 if self._polled_at is None else self._polled_at + self._commit_interval_s - now
        try:
            async with asyncio.timeout(None) as self._waiting:
                if early_s > 0:
                    await asyncio.sleep(early_s)
                records = await self._consumer.poll(POLL_MS)
        except TimeoutError:  # `stop`
            return []
        finally:
            self._waiting = None
        if records:
            self._polled_at = self._runtime.clock.monotonic()
        return records

    async def _position(self, partition: TopicPartition) -> OffsetAndMetadata:
        """Return the position behind the records that were handed out. It is known, so that this does not wait."""
        at = await self._consumer.position(partition)
        return OffsetAndMetadata(at, self._consumer.position_epoch(partition))

    async def _commit(self, batch: _Batch, results: list[ProducerRecord]) -> None:
        """Produce the results and commit the offsets. Raises if that is not done, or may not be done."""
        self._consumer.group_metadata()  # raises if the partitions are lost: there is nothing to begin then
        batch.transaction = self._producer.transaction()
        async with batch.transaction as transaction:
            for result in results:
                self._producer.send(*result)
                await self._producer.drain()
            await transaction.send_offsets(batch.positions, self._consumer.group_metadata())

    async def _settle(self) -> None:
        """Learn the outcome of the pending batch's transaction, and go back if it was not committed. Raises
        CommitOutcomeUnknown, and errors of the group's coordinator."""
        batch = self._pending
        if batch is None:
            return
        begun = batch.transaction if batch.transaction is not None and batch.transaction.has_begun else None
        if begun is not None and await begun.was_committed():
            self._committed()
            return
        await self._go_back(batch)
        self._pending = None

    def _committed(self) -> None:
        """The pending batch is committed."""
        self._pending = None
        self._unfinished = ()
        self._failures = 0

    async def _go_back(self, batch: _Batch) -> None:
        """Continue at the committed offsets. The partitions cannot change hands meanwhile, since the consumer was not
        asked for other records. The coordinator answers once no transaction is open for them."""
        kept = [partition for partition in batch.first if partition in self._consumer.assignment()]
        committed = await self._consumer.committed(*kept) if kept else {}
        assigned = self._consumer.assignment()
        for partition in kept:
            if partition in assigned:  # otherwise its topic was deleted
                at = committed.get(partition) or OffsetAndMetadata(batch.first[partition])
                self._consumer.seek(partition, at.offset, at.leader_epoch)

    async def _pause(self, error: MinibrokerError) -> None:
        """Wait before the pending batch is repeated. Raises the error if it is not to be repeated."""
        if not may_pass(error):
            raise error
        self._failures += 1
        what = "asking for records"
        if self._pending is not None:
            count = counted(len(self._pending.records), "record")
            what = f"a batch of {count} is not committed, and is repeated unless it turns out to be"
        logger.warning("%s: %s: %s", self._runtime.connections.client_id, what, error)
        await asyncio.sleep(
            exponential_backoff_s(self._failures, self._runtime.retry_backoff_s, self._runtime.world.random)
        )


_OURS_OF_CONSUMER: Mapping[str, str] = {
    "partitions": "a processor shares the partitions of its topics with its group",
    "enable_auto_commit": "offsets are committed with the results",
    "auto_commit_interval_ms": "offsets are committed with the results",
    "listener": "a processor gives up partitions by itself",
}
"""Settings that a processor's consumer must not have, and why."""


def _further(
    name: str,
    settings: Mapping[str, Any] | None,
    client: type[Consumer | Producer],
    given: Mapping[str, object],
    ours: Mapping[str, str],
) -> Mapping[str, Any]:
    """Raises InvalidSetting for settings that have another place, or that the client does not have."""
    if not isinstance(settings, Mapping | None):
        raise InvalidSetting(name, settings, "give a dict of settings by name")
    further = {} if settings is None else dict(settings)
    known = arguments_of(client.__init__)
    for setting, value in further.items():
        if setting in given:
            raise InvalidSetting(f"{name}[{setting!r}]", value, f"give it to the Processor: {setting}=...")
        if setting in ours:
            raise InvalidSetting(f"{name}[{setting!r}]", value, f"leave it out: {ours[setting]}")
        if setting not in known or setting == "bootstrap":
            hint = meant(str(setting), known) or f"help({client.__name__}) lists them"
            raise InvalidSetting(f"{name}[{setting!r}]", value, f"a {client.__name__} has no such setting: {hint}")
    return further
