"""Arrow batches as records, against scripted brokers."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow
import pytest
from pyspark.sql.types import BinaryType, StructField, StructType

from minibroker.client.errors import DeliveryFailed, InvalidSetting
from minibroker.client.producing.partitioners import crc32
from minibroker.protocol.apis import PRODUCE
from minibroker.protocol.errors import BrokerError, MinibrokerError
from minibroker.spark_jobs.source import look_ups, writing
from minibroker.spark_jobs.source.options import WriteOptions
from minibroker.spark_jobs.source.source import BatchWriter, MinibrokerDataSource
from minibroker.spark_jobs.source.writing import Written, check_write_schema, write_batches
from tests.unit.client.scripted_broker import CARRY_OUT_AND_DROP
from tests.unit.spark_jobs.scripted_log import ScriptedLog, scripted_log

HEADERS = pyarrow.list_(pyarrow.struct([("key", pyarrow.string()), ("value", pyarrow.binary())]))


@pytest.fixture
def log() -> Iterator[ScriptedLog]:
    with scripted_log() as scripted:
        scripted.topic("t", 2)
        yield scripted


def test_columns_become_records(log: ScriptedLog) -> None:
    batch = pyarrow.record_batch(
        {
            "value": pyarrow.array(["a", None]),
            "key": pyarrow.array([b"k", None]),
            "headers": pyarrow.array([[("h", b"1"), ("i", None)], None], HEADERS),
            "topic": pyarrow.array(["t", "t"]),
            "partition": pyarrow.array([1, 1], pyarrow.int32()),
            "another": pyarrow.array([1, 2]),
        }
    )
    assert write_batches(WriteOptions(log.bootstrap, None), iter([batch, batch])) == Written(4)
    (first, second) = log.log("t", 1).decoded()
    assert (first.values, first.keys, first.headers) == ([b"a", None], [b"k", None], [[("h", b"1"), ("i", None)], None])
    assert second.values == first.values


@pytest.mark.parametrize("kind", ["binary", "string"])
def test_columns_of_values_and_keys_are_sent_whole(
    log: ScriptedLog, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "SLICE_BYTES", 2_000)
    texts = [None if number % 10 == 0 else f"{number}" for number in range(1_000)]
    values = pyarrow.array(texts).cast(kind)
    keyed = pyarrow.record_batch({"value": values, "key": values, "another": pyarrow.array(range(1_000))})
    assert write_batches(WriteOptions(log.bootstrap, "t"), [keyed[:500], keyed[500:]]) == Written(1_000)
    found = [
        (key, value)
        for partition in range(2)
        for key, value in zip(log.log("t", partition).keys(), log.log("t", partition).values(), strict=True)
    ]
    expected = [None if text is None else text.encode() for text in texts]
    assert sorted(map(str, found)) == sorted(str((each, each)) for each in expected)
    for partition in range(2):
        numbers = [int(value) for value in log.log("t", partition).values() if value is not None]
        assert numbers == sorted(numbers)
        assert {crc32(b"%d" % number, 2) for number in numbers} == {partition}
    write_batches(WriteOptions(log.bootstrap, "t"), [pyarrow.record_batch({"value": values})])
    assert sum(log.log("t", partition).end for partition in range(2)) == 2_000


def test_an_acknowledgement_that_is_lost_makes_no_duplicate(log: ScriptedLog) -> None:
    log.script(PRODUCE, CARRY_OUT_AND_DROP)
    batch = pyarrow.record_batch(
        {"value": pyarrow.array([b"a", b"b"], pyarrow.large_binary()), "partition": pyarrow.array([0, 0])}
    )
    assert write_batches(WriteOptions(log.bootstrap, "t"), [batch]).rows == 2
    assert log.log("t", 0).values() == [b"a", b"b"]
    assert len(log.call(lambda: log.cluster.requests(PRODUCE))) == 2


def test_no_rows_are_no_records(log: ScriptedLog) -> None:
    assert write_batches(WriteOptions(log.bootstrap, "t"), []) == Written(0)
    empty = pyarrow.record_batch({"value": pyarrow.array([], pyarrow.string())})
    assert write_batches(WriteOptions(log.bootstrap, "t"), [empty]) == Written(0)


def test_rows_that_cannot_be_records_fail_the_task(log: ScriptedLog) -> None:
    options = WriteOptions(log.bootstrap, None)
    values = pyarrow.array([b"a"])
    no_topic = pyarrow.record_batch({"value": values, "topic": pyarrow.array([None], pyarrow.string())})
    with pytest.raises(MinibrokerError, match="a row's topic is null"):
        write_batches(options, [no_topic])
    for headers in ([[None]], [[(None, b"1")]]):
        bad = pyarrow.record_batch(
            {"value": values, "topic": pyarrow.array(["t"]), "headers": pyarrow.array(headers, HEADERS)}
        )
        with pytest.raises(MinibrokerError, match="headers contain null"):
            write_batches(options, [bad])
    lost = pyarrow.record_batch({"value": values, "topic": pyarrow.array(["t"]), "partition": pyarrow.array([7])})
    with pytest.raises((DeliveryFailed, MinibrokerError), match="UNKNOWN_TOPIC_OR_PARTITION"):
        write_batches(options, [lost])


def test_a_missing_topic_is_reported_on_the_driver_before_tasks_run(
    log: ScriptedLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(look_ups, "UNKNOWN_TOPIC_PATIENCE_S", 0.1)
    schema = StructType([StructField("value", BinaryType())])
    source = MinibrokerDataSource({"bootstrap.servers": log.bootstrap, "topic": "t"})
    assert isinstance(source.writer(schema, overwrite=False), BatchWriter)
    source = MinibrokerDataSource({"bootstrap.servers": log.bootstrap, "topic": "missing"})
    with pytest.raises(BrokerError, match="missing.*minibroker topics create"):
        source.writer(schema, overwrite=False)


def test_the_columns_of_a_dataframe_are_checked_before_anything_is_written() -> None:
    check_write_schema(WriteOptions("a:1", "t"), {"value": "string", "id": "bigint"})
    check_write_schema(WriteOptions("a:1", None), {"value": "binary", "topic": "string", "partition": "int"})
    for types, expected in (
        ({"key": "string"}, "there is no column `value`"),
        ({"value": "bigint"}, "column value='bigint': its type must be binary or string: cast it"),
        ({"value": "string", "partition": "bigint"}, "column partition='bigint': its type must be int"),
        ({"value": "string"}, "give the option `topic`, or a column `topic`"),
    ):
        with pytest.raises(InvalidSetting, match=expected):
            check_write_schema(WriteOptions("a:1", None), types)
