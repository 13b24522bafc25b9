"""The topic of a benchmark: created if it does not exist, checked if it does."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from minibroker.client.admin import Admin
from minibroker.client.administering.topics import TopicDescription
from minibroker.client.cli.terminal.output import API_TIMEOUT_MS
from minibroker.client.cli.topics import open_admin
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError

DEFAULT_PARTITIONS = 3
_POLL_S = 0.1
_MISMATCH_PATIENCE_S = 2.0
"""A broker that lags may still describe a deleted topic of the same name."""

PartitionsOption = Annotated[
    int | None,
    typer.Option(min=1, max=10_000, help=f"Partitions of the topic, if it is created. Default: {DEFAULT_PARTITIONS}."),
]
ReplicationFactorOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=1_000,
        help="Replicas of each partition, if the topic is created. Default: default.replication.factor.",
    ),
]


async def ensure_topic(
    bootstrap: str, name: str, partitions: int | None, replication_factor: int | None
) -> TopicDescription:
    """Return the topic, created if necessary. Raises MinibrokerError if an existing topic differs from the options."""
    began = time.monotonic()
    is_new = False
    async with open_admin(bootstrap) as admin:
        while True:
            if not is_new:
                is_new = await _created(admin, name, partitions or DEFAULT_PARTITIONS, replication_factor)
            try:
                topic = await admin.describe_topic(name)
                problem = _mismatch(topic, partitions, replication_factor)
                if problem is None:
                    return topic
                patience_s = _MISMATCH_PATIENCE_S
            except BrokerError as error:
                if error.code is not ErrorCode.UNKNOWN_TOPIC_OR_PARTITION:
                    raise
                problem = f"a topic {name} is still being deleted: name another topic, or try again later"
                patience_s = API_TIMEOUT_MS / 1_000
            # A broker learns of a large topic part by part.
            if time.monotonic() - began >= (API_TIMEOUT_MS / 1_000 if is_new else patience_s):
                raise MinibrokerError(problem)
            await asyncio.sleep(_POLL_S)


async def _created(admin: Admin, name: str, partitions: int, replication_factor: int | None) -> bool:
    """Return False if the name is taken, perhaps by a topic that is being deleted."""
    try:
        await admin.create_topic(name, partitions=partitions, replication_factor=replication_factor)
    except BrokerError as error:
        if error.code is not ErrorCode.TOPIC_ALREADY_EXISTS:
            raise
        return False
    return True


def _mismatch(topic: TopicDescription, partitions: int | None, replication_factor: int | None) -> str | None:
    """Describe the first difference between the topic and the options, with the remedy."""
    for asked, there, noun, option in (
        (partitions, len(topic.partitions), "partitions", "--partitions"),
        (replication_factor, len(topic.partitions[0].replicas), "replicas", "--replication-factor"),
    ):
        if asked is not None and asked != there:
            return (
                f"the topic {topic.name} has {there} {noun}, but {option} is {asked}: leave the option out, "
                f"name another topic, or delete this one with `minibroker topics delete {topic.name}`"
            )
    return None
