"""Topics, records and DataFrames for tests of the data source."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming.query import StreamingQuery

from minibroker.client.admin import Admin
from minibroker.client.consumer import Consumer
from minibroker.client.fetching.records import Record
from minibroker.client.producer import Producer
from minibroker.protocol.errors import BrokerError, ErrorCode
from tests.faults.hostile.readers import connected_to_leader, lying_batch, produced


class Logs:
    """`topic` has the test's name; `create` creates it."""

    def __init__(self, spark: SparkSession, bootstrap: str, topic: str) -> None:
        self.spark = spark
        self.bootstrap = bootstrap
        self.topic = topic

    def create(self, partitions: int = 2, topic: str | None = None) -> None:
        async def run() -> None:
            async with Admin(self.bootstrap) as admin:
                await admin.create_topic(topic or self.topic, partitions=partitions, replication_factor=3)

        asyncio.run(run())

    def delete(self, topic: str) -> None:
        """Return once no broker knows it."""

        async def run() -> None:
            async with asyncio.timeout(60), Admin(self.bootstrap) as admin:
                await admin.delete_topic(topic)
                while topic in await admin.list_topics():
                    await asyncio.sleep(0.05)

        asyncio.run(run())

    def create_again(self) -> None:
        """Delete the topic, and create another of its name and number of partitions."""

        async def run() -> None:
            async with asyncio.timeout(60), Admin(self.bootstrap) as admin:
                partitions = len((await admin.describe_topic(self.topic)).partitions)
                await admin.delete_topic(self.topic)
                while True:
                    try:
                        await admin.create_topic(self.topic, partitions=partitions, replication_factor=3)
                        return
                    except BrokerError as error:  # not deleted yet
                        if error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
                            raise
                    await asyncio.sleep(0.05)

        asyncio.run(run())

    def produce(self, values: Iterable[bytes], *, partition: int = 0, topic: str | None = None, **options: Any) -> None:
        async def run() -> None:
            async with Producer(self.bootstrap) as producer:
                for value in values:
                    producer.send(topic or self.topic, value, partition=partition, **options)
                    await producer.drain()

        asyncio.run(run())

    def produce_lie(self, value: bytes, timestamp_ms: int) -> None:
        """Produce a record to partition 0 whose batch denies this timestamp."""

        async def run() -> None:
            connection = await connected_to_leader(self.bootstrap, self.topic)
            assert await produced(connection, lying_batch(value, timestamp_ms), self.topic) == ErrorCode.NONE
            connection.close()

        asyncio.run(run())

    def consume(self, count: int) -> list[Record]:
        async def run() -> list[Record]:
            records: list[Record] = []
            async with asyncio.timeout(60), Consumer(self.bootstrap, topics=[self.topic]) as consumer:
                async for record in consumer:
                    records.append(record)
                    if len(records) == count:
                        break
            return records

        return asyncio.run(run())

    def options(self, **options: Any) -> dict[str, str]:
        given = {name: str(value) for name, value in options.items()}
        if not given.keys() & {"subscribe", "subscribePattern", "assign"}:
            given["subscribe"] = self.topic
        return {"bootstrap.servers": self.bootstrap} | given

    def batch(self, **options: Any) -> DataFrame:
        return self.spark.read.format("minibroker").options(**self.options(**options)).load()

    def stream(self, **options: Any) -> DataFrame:
        return self.spark.readStream.format("minibroker").options(**self.options(**options)).load()

    def drain(self, directory: Path, **options: Any) -> StreamingQuery:
        """Run a query over all records and append its rows to Parquet files in `directory`/out."""
        query = self.start(directory, available_now=True, **options)
        try:
            assert query.awaitTermination(60)
        finally:
            query.stop()
        return query

    def start(self, directory: Path, *, available_now: bool = False, **options: Any) -> StreamingQuery:
        writer = (
            self.stream(**options)
            .writeStream.format("parquet")
            .option("path", str(directory / "out"))
            .option("checkpointLocation", str(directory / "checkpoint"))
        )
        return (
            writer.trigger(availableNow=True) if available_now else writer.trigger(processingTime="0 seconds")
        ).start()

    def written(self, directory: Path) -> list[tuple[str, int, int, bytes]]:
        rows = self.spark.read.parquet(str(directory / "out")).select("topic", "partition", "offset", "value").collect()
        return sorted((row.topic, row.partition, row.offset, bytes(row.value)) for row in rows)
