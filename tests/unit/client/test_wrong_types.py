"""A wrong value for an argument raises an error that names the value, the rule and the remedy."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from minibroker.client.admin import Admin
from minibroker.client.administering.topics import NewTopic
from minibroker.client.consumer import Consumer
from minibroker.client.errors import InvalidSetting
from minibroker.client.fetching.records import Record
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.client.group.listener import RebalanceListener
from minibroker.client.producer import Producer
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import decode_batch, iterate_batches
from tests.unit.client.scripted_broker import ScriptedCluster

P0 = TopicPartition("orders", 0)
A_PARTITION = r'give TopicPartition\("topic", 0\)'
A_LIST = r'give a list: \[TopicPartition\("topic", 0\)\]'
A_DICT = r'give a dict: \{TopicPartition\("topic", 0\): '
Call = Callable[[Any], Any]

OF_CONSUMER: list[tuple[Call, str]] = [
    (lambda c: c.commit(5), rf"offsets=5: {A_DICT}5\}}"),
    (lambda c: c.commit([P0]), rf"offsets=\[.*\]: {A_DICT}"),
    (lambda c: c.commit(P0), rf"offsets=.*: {A_DICT}"),
    (lambda c: c.commit_nowait(5), A_DICT),
    (lambda c: c.commit({"orders": 5}), rf"'orders': {A_PARTITION}"),
    (lambda c: c.commit({P0: "5"}), "offset='5': give a whole number .*, for orders-0$"),
    (lambda c: c.offsets_for_times({P0: -1}), "timestamp_ms=-1: give a whole number .*, for orders-0$"),
    (lambda c: c.commit({P0: OffsetAndMetadata(5, metadata=b"x")}), "metadata=b'x': give text"),  # type: ignore[arg-type]
    (lambda c: c.commit({P0: OffsetAndMetadata(5, leader_epoch="1")}), "leader_epoch='1': give a whole number"),  # type: ignore[arg-type]
    (lambda c: c.pause([P0]), rf"partition=\[.*\]: {A_PARTITION}, not a list: put \* before it"),
    (lambda c: c.pause("orders"), rf"partition='orders': {A_PARTITION}"),
    (lambda c: c.resume([P0]), r"put \* before it"),
    (lambda c: c.seek([P0], 5), r"put \* before it"),
    (lambda c: c.seek_to_end([P0]), r"put \* before it"),
    (lambda c: c.position("orders"), A_PARTITION),
    (lambda c: c.committed([P0]), r"put \* before it"),
    (lambda c: c.end_offsets("orders"), rf"partitions='orders': {A_LIST}"),
    (lambda c: c.end_offsets(5), rf"partitions=5: {A_LIST}"),
    (lambda c: c.offsets_for_times([P0]), A_DICT),
    (lambda c: c.assign(5), A_LIST),
]


async def _result(call: Call, client: object) -> object:
    found = call(client)
    return await found if inspect.isawaitable(found) else found


async def test_arguments_of_a_consumer() -> None:
    async with ScriptedCluster(1) as cluster:
        cluster.add_topic("orders", 1)
        async with Consumer(cluster.bootstrap, group="billing", partitions=[P0]) as consumer:
            for call, match in OF_CONSUMER:
                with pytest.raises(InvalidSetting, match=match):
                    await _result(call, consumer)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"group": 3}, "group=3: give a name"),
        ({"topics": 5}, r'topics=5: give a list: \["name"\]'),
        ({"topics": None, "partitions": 5}, A_LIST),
        ({"topics": None, "partitions": "orders"}, A_LIST),
    ],
)
def test_settings_of_a_consumer(settings: dict[str, Any], match: str) -> None:
    with pytest.raises(InvalidSetting, match=match):
        Consumer("localhost:9092", **({"topics": ["orders"]} | settings))


def test_a_listener_that_cannot_be_awaited() -> None:
    class Plain(RebalanceListener):
        def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:  # type: ignore[override]
            """Wrap it in the mistake of a user of minibroker.sync."""

    with pytest.raises(InvalidSetting, match=r"listener=.*on_partitions_assigned is awaited: define it by `async def`"):
        Consumer("localhost:9092", group="billing", topics=["orders"], listener=Plain())


OF_PRODUCER: list[tuple[Call, type[Exception], str]] = [
    (lambda p: p.send("orders", b"x", partition="0"), InvalidSetting, "partition='0': give a whole number"),
    (lambda p: p.send("orders", b"x", partition=True), InvalidSetting, "partition=True: give a whole number"),
    (lambda p: p.send_batch("orders", [b"x"], partition="0"), InvalidSetting, "partition='0': give a whole number"),
    (lambda p: p.send(5, b"x"), BrokerError, "INVALID_TOPIC_EXCEPTION: 5: a name is a str$"),
    (lambda p: p.send(None, b"x"), BrokerError, "INVALID_TOPIC_EXCEPTION: None: a name is a str$"),
    (lambda p: p.send("a b", b"x"), BrokerError, "'a b' contains ' ': only a-z A-Z 0-9 . _ - are legal$"),
    (lambda p: p.send("orders", b"x", headers=5), TypeError, "headers must be a list .*, not 5"),
    (lambda p: p.send_batch("orders", pa.table({"a": [b"x"]})), TypeError, 'pass one column of the Table, .*"column"'),
    (
        lambda p: p.send_batch("orders", [b"x"], timestamps_ms=pa.array(["1"])),
        TypeError,
        "ints or timestamps, not of s",
    ),
    (lambda p: p.send_batch("orders", [b"x"], timestamps_ms=pa.array([None], "int64")), BrokerError, r"_ms\[0\]=None"),
]


A_MEGABYTE = b"iban " * 200_000
A_RECORD = Record("orders", 0, 5, 1_000, b"iban", A_MEGABYTE, [("h", b"iban")])
OF_BOTH: list[tuple[Call, Call]] = [
    (lambda c: c.commit(A_RECORD), lambda p: p.send("orders", b"", headers=A_MEGABYTE)),
    (lambda c: c.commit([A_RECORD] * 500), lambda p: p.send("orders", b"", headers=[A_RECORD])),
    (lambda c: c.commit({P0: A_RECORD}), lambda p: p.send("orders", b"", partition=A_MEGABYTE)),
    (lambda c: c.seek(A_RECORD, 1), lambda p: p.send("orders", b"", timestamp_ms=A_RECORD)),
    (lambda c: c.commit_nowait({A_RECORD.topic: 5}), lambda p: p.send(A_MEGABYTE, b"")),
    (lambda c: c.subscribe(A_MEGABYTE.decode()), lambda p: p.send_batch("orders", [b""], timestamps_ms=[A_RECORD])),
]


async def test_what_is_passed_by_mistake_is_not_written_out() -> None:
    async with ScriptedCluster(1) as cluster:
        cluster.add_topic("orders", 1)
        consumer = Consumer(cluster.bootstrap, topics=["orders"], group="billing")
        async with consumer, Producer(cluster.bootstrap) as producer:
            await producer.send("orders", b"x")
            for of_consumer, of_producer in OF_BOTH:
                for call, client in ((of_consumer, consumer), (of_producer, producer)):
                    with pytest.raises((MinibrokerError, TypeError)) as raised:
                        await _result(call, client)
                    text = str(raised.value)
                    assert len(text) < 500, text[:500]
                    assert "key=" not in text


async def test_arguments_of_a_producer() -> None:
    async with ScriptedCluster(1) as cluster:
        cluster.add_topic("orders", 1)
        async with Producer(cluster.bootstrap) as producer:
            await producer.send("orders", b"x")
            for call, error, match in OF_PRODUCER:
                with pytest.raises(error, match=match):
                    await _result(call, producer)


@pytest.mark.parametrize(
    "times",
    [
        pa.array([1_000, 2_000]),
        pa.array([0, 1_000, 2_000], "uint32")[1:],
        pa.chunked_array([[1_000], [2_000]]),
        pa.array([1, 2], pa.timestamp("s")),
        pa.array([1_000, 2_000], pa.timestamp("ms", "Europe/Berlin")),
        pa.array([1_000_999, 2_000_000], pa.timestamp("us")),
        pa.array([1_000_000_000, 2_000_000_999], pa.timestamp("ns")),
    ],
)
async def test_timestamps_may_be_an_array_of_arrows(times: Any) -> None:
    async with ScriptedCluster(1) as cluster:
        cluster.add_topic("orders", 1)
        async with Producer(cluster.bootstrap) as producer:
            await producer.send_batch("orders", [b"a", b"b"], timestamps_ms=times)
        data = cluster.log("orders").read(0, 1 << 20)
        [piece] = iterate_batches(data)
        assert list(decode_batch(data, piece.header, piece.start).timestamps) == [1_000, 2_000]


async def test_arguments_of_an_admin() -> None:
    calls: list[tuple[Call, str]] = [
        (lambda a: a.alter_group_offsets("billing", 5), A_DICT),
        (lambda a: a.alter_group_offsets("billing", {P0: OffsetAndMetadata(5, metadata=b"x")}), "metadata=b'x'"),  # type: ignore[arg-type]
        (lambda a: a.list_offsets([P0]), A_DICT),
        (lambda a: a.delete_records(P0), A_DICT),
        (lambda a: a.delete_records({P0: -2}), "offset=-2: give a whole number .*, for orders-0$"),
        (lambda a: a.create_topics([NewTopic("orders", 0)]), "partitions=0: give a whole number .*, for orders$"),
        (lambda a: a.create_topic(5), "name=5: a name is a str"),
        (lambda a: a.create_topics([NewTopic(b"orders")]), "name=b'orders': a name is a str"),  # type: ignore[arg-type]
    ]

    async with ScriptedCluster(1) as cluster, Admin(cluster.bootstrap) as admin:
        for call, match in calls:
            with pytest.raises(InvalidSetting, match=match):
                await _result(call, admin)


@pytest.mark.slow
async def test_offsets_of_what_is_unknown_to_all_brokers_are_not_waited_for() -> None:
    async with ScriptedCluster(2) as cluster:
        cluster.add_topic("orders", 1)
        async with Consumer(cluster.bootstrap, group="billing", partitions=[P0]) as consumer:
            for unknown, told in (
                (TopicPartition("ordres", 0), "ordres-0"),
                (TopicPartition("orders", 7), "orders has no partition 7"),
            ):
                for ask in (consumer.end_offsets, consumer.beginning_offsets):
                    with pytest.raises(BrokerError, match=told) as refused:
                        async with asyncio.timeout(20):
                            await ask([unknown])
                    assert refused.value.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
