"""Read-process-write programs for `tests.faults.exactly_once`, one for each client.

    python -m tests.faults.transactors CLIENT BOOTSTRAP GROUP TRANSACTIONAL_ID

Each moves the records of `inputs` to `results`, with a tag for their transaction: `INPUT WORKER/NUMBER COUNT`, where
COUNT is the number of results in the transaction. It runs until SIGTERM. Exit code FENCED: another producer has the
transactional id.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import uvloop

from minibroker.client.errors import ProducerFenced
from minibroker.client.fetching.records import Record
from minibroker.client.processing.results import ProducerRecord
from minibroker.client.processor import Processor

if TYPE_CHECKING:
    import confluent_kafka

INPUTS, RESULTS = "inputs", "results"
RECORDS = 5
"""The most records of a transaction."""
SESSION_TIMEOUT_MS = 3_000
TRANSACTION_TIMEOUT_MS = 10_000
FENCED = 3
STUCK_S = 25.0
"""librdkafka 2.10 and later can wait for ever when the group's coordinator has moved or died: in
`send_offsets_to_transaction` and `abort_transaction`, whatever their time-out (its issues 5511 and 5456), and in a
consumer that polls nothing of a partition (5586). A program that moves nothing for this long ends with code 1."""
_WORKER = f"{os.getpid()}-{time.time_ns()}"


def result_of(value: bytes, number: int, count: int) -> bytes:
    return b"%b %b/%d %d" % (value, _WORKER.encode(), number, count)


# --- minibroker ------------------------------------------------------------------------------------------------------


async def run_minibroker(bootstrap: str, group: str, transactional_id: str) -> None:
    number = 0

    async def process(records: list[Record]) -> list[ProducerRecord]:
        nonlocal number
        number += 1
        return [
            ProducerRecord(RESULTS, result_of(record.value, number, len(records)), partition=record.partition)
            for record in records
        ]

    async with Processor(
        bootstrap,
        topics=[INPUTS],
        group=group,
        transactional_id=transactional_id,
        process=process,
        max_poll_records=RECORDS,
        transaction_timeout_ms=TRANSACTION_TIMEOUT_MS,
        consumer_settings={
            "session_timeout_ms": SESSION_TIMEOUT_MS,
            "heartbeat_interval_ms": SESSION_TIMEOUT_MS / 6,
        },
    ) as processor:
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, processor.stop)
        await processor.run()


# --- confluent-kafka -------------------------------------------------------------------------------------------------


class Confluent:
    """The loop that librdkafka's documentation describes, and the care that it leaves to its users."""

    def __init__(self, bootstrap: str, group: str, transactional_id: str) -> None:
        import confluent_kafka

        self._kafka = confluent_kafka
        own: dict[str, Any] = {"bootstrap.servers": bootstrap, "log_level": 3}
        self._producer = confluent_kafka.Producer(
            {
                **own,
                "transactional.id": transactional_id,
                "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
                "message.timeout.ms": TRANSACTION_TIMEOUT_MS,
                "linger.ms": 0,
            }
        )
        self._consumer = confluent_kafka.Consumer(
            {
                **own,
                "group.id": group,
                "session.timeout.ms": SESSION_TIMEOUT_MS,
                "heartbeat.interval.ms": SESSION_TIMEOUT_MS // 6,
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "partition.assignment.strategy": "cooperative-sticky",
            }
        )
        self._taken: list[confluent_kafka.Message] = []
        self._is_over = False

    def run(self) -> None:
        signal.signal(signal.SIGTERM, self._end)
        self._again(lambda: self._producer.init_transactions(10))
        self._consumer.subscribe([INPUTS], on_revoke=self._gone, on_lost=self._gone)
        number = 0
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        while not self._is_over:
            self._take()
            if self._taken:
                number += 1
                self._move(number)
                faulthandler.dump_traceback_later(STUCK_S, exit=True)
        faulthandler.cancel_dump_traceback_later()
        self._consumer.close()

    def _end(self, *_: object) -> None:
        self._is_over = True

    def _gone(self, _: object, partitions: list[confluent_kafka.TopicPartition]) -> None:
        """Partitions were revoked while messages of them were collected: these go to another member."""
        gone = {each.partition for each in partitions}
        self._taken = [message for message in self._taken if message.partition() not in gone]

    def _take(self) -> None:
        self._taken = []
        while len(self._taken) < RECORDS:
            message = self._consumer.poll(0 if self._taken else 0.2)
            if message is None:
                return
            if message.error() is None:
                self._taken.append(message)

    def _move(self, number: int) -> None:
        taken = self._taken
        positions = {message.partition(): (message.offset() or 0) + 1 for message in taken}
        offsets = [self._kafka.TopicPartition(INPUTS, partition or 0, at) for partition, at in positions.items()]
        self._producer.begin_transaction()
        try:
            for message in taken:
                value = result_of(message.value() or b"", number, len(taken))
                self._producer.produce(RESULTS, value, partition=message.partition() or 0)
            metadata = self._consumer.consumer_group_metadata()
            self._again(lambda: self._producer.send_offsets_to_transaction(offsets, metadata, 10))
            self._again(lambda: self._producer.commit_transaction(10))
        except self._kafka.KafkaException as failure:
            if not failure.args[0].txn_requires_abort():
                raise
            self._again(lambda: self._producer.abort_transaction(10))
            self._go_back(positions)

    def _again(self, call: Callable[[], object]) -> None:
        while True:
            try:
                call()
                return
            except self._kafka.KafkaException as failure:
                if not failure.args[0].retriable():
                    raise

    def _go_back(self, positions: dict[int | None, int]) -> None:
        partitions = [each for each in self._consumer.assignment() if each.partition in positions]
        while partitions:
            try:
                committed = self._consumer.committed(partitions, timeout=10)
                break
            except self._kafka.KafkaException:
                time.sleep(0.1)
        else:
            return
        for each in committed:
            with contextlib.suppress(self._kafka.KafkaException):  # it was lost meanwhile
                self._consumer.seek(self._kafka.TopicPartition(INPUTS, each.partition, max(0, each.offset)))


def run_confluent(bootstrap: str, group: str, transactional_id: str) -> None:
    from confluent_kafka import KafkaException

    try:
        Confluent(bootstrap, group, transactional_id).run()
    except KafkaException as failure:
        print(failure, file=sys.stderr, flush=True)
        os._exit(FENCED if failure.args[0].fatal() else 1)  # without waiting for the consumer


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    client, *arguments = sys.argv[1:]
    if client == "confluent-kafka":
        run_confluent(*arguments)
        return
    try:
        uvloop.run(run_minibroker(*arguments))
    except ProducerFenced as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(FENCED)


if __name__ == "__main__":
    main()
