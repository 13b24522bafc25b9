"""Text that UTF-8 cannot encode, as Python makes from bytes outside the locale's encoding, is one clear error wherever
it enters."""

from __future__ import annotations

import asyncio
import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigResource
from minibroker.client.administering.topics import NewTopic
from minibroker.client.consumer import Consumer
from minibroker.client.errors import InvalidSetting, SerializationFailed
from minibroker.client.group.commits import OffsetAndMetadata
from minibroker.client.producer import Producer
from minibroker.protocol.errors import BrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.sync import Producer as SyncProducer
from tests.unit.client.scripted_broker import ScriptedCluster

BAD = "a\udcff"
P0, BAD_PARTITION = TopicPartition("orders", 0), TopicPartition(BAD, 0)
TOPIC = ConfigResource.of_topic("orders")

CONSTRUCTORS: dict[str, Callable[[str], object]] = {
    "client id of a producer": lambda at: Producer(at, client_id=BAD),
    "client id of a consumer": lambda at: Consumer(at, topics=["orders"], client_id=BAD),
    "client id of an admin": lambda at: Admin(at, client_id=BAD),
    "client id of a blocking producer": lambda at: SyncProducer(at, client_id=BAD),
    "bootstrap": lambda at: Admin(f"{BAD}:9092"),
    "topics": lambda at: Consumer(at, topics=[BAD]),
    "partitions": lambda at: Consumer(at, partitions=[BAD_PARTITION]),
    "group": lambda at: Consumer(at, topics=["orders"], group=BAD),
    "group of partitions": lambda at: Consumer(at, partitions=[P0], group=BAD),
    "instance": lambda at: Consumer(at, topics=["orders"], group="g", group_instance_id=BAD),
}


class Clients:
    def __init__(self, at: str) -> None:
        self.producer = Producer(at)
        self.text = Producer(at, key_serializer="str", value_serializer="json")
        self.consumer = Consumer(at, group="g", partitions=[P0])
        self.admin = Admin(at)


CALLS: dict[str, Callable[[Clients], object]] = {
    "send": lambda c: c.producer.send(BAD, b"v"),
    "header": lambda c: c.producer.send("orders", b"v", headers=[(BAD, b"")]),
    "key": lambda c: c.text.send("orders", None, key=BAD),
    "value": lambda c: c.text.send("orders", {"name": BAD}),
    "send_batch": lambda c: c.producer.send_batch(BAD, [b"v"]),
    "metadata": lambda c: c.consumer.commit({P0: OffsetAndMetadata(1, None, BAD)}),
    "commit": lambda c: c.consumer.commit({BAD_PARTITION: 1}),
    "create_topic": lambda c: c.admin.create_topic(BAD),
    "name of a setting": lambda c: c.admin.create_topics([NewTopic("t", configs={BAD: "1"})]),
    "value of a setting": lambda c: c.admin.create_topics([NewTopic("t", configs={"cleanup.policy": BAD})]),
    "delete_topic": lambda c: c.admin.delete_topic(BAD),
    "describe_topics": lambda c: c.admin.describe_topics([BAD]),
    "describe_configs": lambda c: c.admin.describe_configs([ConfigResource.of_topic(BAD)]),
    "names of describe_configs": lambda c: c.admin.describe_configs([TOPIC], names=[BAD]),
    "alter a name": lambda c: c.admin.incremental_alter_configs({TOPIC: [ConfigChange.delete(BAD)]}),
    "alter a value": lambda c: c.admin.incremental_alter_configs({TOPIC: [ConfigChange.set("a", BAD)]}),
    "list_offsets": lambda c: c.admin.list_offsets({BAD_PARTITION: 0}),
    "describe_groups": lambda c: c.admin.describe_groups([BAD]),
    "delete_groups": lambda c: c.admin.delete_groups([BAD]),
    "list_group_offsets": lambda c: c.admin.list_group_offsets(BAD),
    "alter_group_offsets": lambda c: c.admin.alter_group_offsets(BAD, {P0: 1}),
    "metadata of a group": lambda c: c.admin.alter_group_offsets("g", {P0: OffsetAndMetadata(1, None, BAD)}),
    "delete_group_offsets": lambda c: c.admin.delete_group_offsets(BAD, [P0]),
}


def is_clear(error: Exception) -> bool:
    """Assert that the message escapes the character, so that it can be printed and logged anywhere."""
    str(error).encode()
    return "\\udcff" in str(error)


@pytest.mark.parametrize("what", CONSTRUCTORS)
def test_constructors_refuse_text_that_cannot_be_sent(what: str) -> None:
    with pytest.raises(InvalidSetting) as caught:
        CONSTRUCTORS[what]("127.0.0.1:1")
    assert is_clear(caught.value)


async def test_calls_refuse_text_that_cannot_be_sent() -> None:
    async def called(call: Callable[[Clients], object], clients: Clients) -> None:
        result: Any = call(clients)
        if inspect.isawaitable(result):
            async with asyncio.timeout(30):
                await result

    async with ScriptedCluster(1) as cluster:
        cluster.add_topic("orders")
        clients = Clients(cluster.bootstrap)
        async with clients.producer, clients.text, clients.consumer, clients.admin:
            for what, call in CALLS.items():
                with pytest.raises((InvalidSetting, BrokerError, SerializationFailed)) as caught:
                    await called(call, clients)
                assert is_clear(caught.value), what
            await clients.producer.send("orders", b"as well as ever")


def test_commands_print_what_the_locale_does_not_know_as_escapes() -> None:
    program = """
import typer
from minibroker.client.cli.terminal.output import print_lines, run_app

app = typer.Typer()

@app.command()
def show() -> None:
    print_lines(["gr\\xe9", "a\\udcff"])

raise SystemExit(run_app(app, []))
"""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONIOENCODING": "ascii"},
        capture_output=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stdout) == (0, b"gr\\xe9\na\\udcff\n"), ended.stderr
