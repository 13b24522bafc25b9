"""The blocking processor: the function runs in the thread that calls `run`, which may be interrupted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from minibroker.client.errors import Closed, InvalidSetting
from minibroker.client.fetching.records import Record
from minibroker.client.processing.results import ProducerRecord
from minibroker.protocol.apis import END_TXN, TXN_OFFSET_COMMIT
from minibroker.protocol.errors import ErrorCode
from minibroker.sync import Processor, Producer
from tests.unit.client.scripted_broker import reject
from tests.unit.client.scripted_thread import ClusterThread, scripted_cluster


@pytest.fixture
def cluster() -> Iterator[ClusterThread]:
    with scripted_cluster() as running:
        running.do(lambda: running.cluster.add_topic("bills"))
        yield running


def send(cluster: ClusterThread, *values: bytes) -> None:
    with Producer(cluster.bootstrap) as producer:
        for value in values:
            producer.send("orders", value)


def processor_of(cluster: ClusterThread, process: Any) -> Processor:
    return Processor(
        cluster.bootstrap,
        process=process,
        topics=["orders"],
        group="billing",
        transactional_id="billing-1",
        max_poll_records=2,
        retry_backoff_ms=5,
    )


def billed(cluster: ClusterThread) -> list[bytes | None]:
    return cluster.do(lambda: cluster.cluster.log("bills").committed_values())


class Billing:
    """Bills each record, and stops after that many. Raises the errors in its first calls."""

    def __init__(self, count: int, *errors: BaseException) -> None:
        self.processor: Processor
        self.calls: list[list[bytes]] = []
        self.threads: set[threading.Thread] = set()
        self._count = count
        self._errors = list(errors)

    def __call__(self, records: list[Record]) -> Iterator[ProducerRecord]:
        self.calls.append([record.value for record in records])
        self.threads.add(threading.current_thread())
        for record in records:
            yield ProducerRecord("bills", record.value)
        if self._errors:
            raise self._errors.pop(0)
        if records[-1].offset == self._count - 1:
            self.processor.stop()


def test_the_function_runs_in_the_callers_thread_and_may_stop_the_run(cluster: ClusterThread) -> None:
    send(cluster, b"a", b"b", b"c")
    billing = Billing(3)
    with processor_of(cluster, billing) as billing.processor:
        billing.processor.run()
    assert (billing.calls, billed(cluster)) == ([[b"a", b"b"], [b"c"]], [b"a", b"b", b"c"])
    assert billing.threads == {threading.current_thread()}


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_interrupted_batch_comes_again_in_the_next_run(cluster: ClusterThread, error: type[BaseException]) -> None:
    send(cluster, b"a", b"b", b"c")
    billing = Billing(3, error())
    with processor_of(cluster, billing) as billing.processor:
        with pytest.raises(error):
            billing.processor.run()
        assert billed(cluster) == []
        billing.processor.run()
    assert (billing.calls, billed(cluster)) == ([[b"a", b"b"], [b"a", b"b"], [b"c"]], [b"a", b"b", b"c"])


def test_an_aborted_batch_is_repeated(cluster: ClusterThread) -> None:
    send(cluster, b"a", b"b", b"c")
    cluster.do(lambda: cluster.cluster.script(TXN_OFFSET_COMMIT, reject(ErrorCode.ILLEGAL_GENERATION)))
    billing = Billing(3)
    with processor_of(cluster, billing) as billing.processor:
        billing.processor.run()
    assert (billing.calls, billed(cluster)) == ([[b"a", b"b"], [b"a", b"b"], [b"c"]], [b"a", b"b", b"c"])


def test_another_thread_stops_a_run_that_waits(cluster: ClusterThread) -> None:
    with processor_of(cluster, Billing(0)) as processor:
        threading.Timer(0.2, processor.stop).start()
        processor.run()
    processor.stop()  # closed: there is nothing to stop
    with pytest.raises(Closed):
        processor.run()


def test_a_processor_closed_while_its_function_runs_commits_nothing(cluster: ClusterThread) -> None:
    send(cluster, b"a")
    processor: Processor

    def process(records: list[Record]) -> list[ProducerRecord]:
        closing = threading.Thread(target=processor.close)
        closing.start()
        closing.join()
        return [ProducerRecord("bills", b"never")]

    with processor_of(cluster, process) as processor, pytest.raises(Closed):
        processor.run()
    assert billed(cluster) == []
    assert cluster.do(lambda: cluster.cluster.requests(END_TXN)) == []


async def coroutine(records: list[Record]) -> list[ProducerRecord]:
    return []


def test_a_function_to_be_awaited_is_refused(cluster: ClusterThread) -> None:
    with pytest.raises(InvalidSetting, match="define it by `def`"):
        processor_of(cluster, coroutine)
