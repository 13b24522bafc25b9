"""The client under Spark's readers: a cluster that is connected to patiently, on the driver and in tasks."""

from __future__ import annotations

import logging

from minibroker.client.runtime import ClientRuntime
from minibroker.protocol.errors import NetworkError
from minibroker.protocol.world import World

logger = logging.getLogger(__name__)

PATIENCE_S = 120.0
"""How long a leader may be missing: an exception in a task costs an attempt, one on the driver the query."""
FIRST_CONTACT_PATIENCE_S = 15.0
"""How long the driver tries to reach any broker at the start of a query: a mistyped address takes that long."""
UNKNOWN_TOPIC_PATIENCE_S = 10.0
"""How long brokers may say that a topic does not exist."""


def new_cluster(bootstrap: str, client_id: str, world: World | None) -> ClientRuntime:
    def crashed(error: BaseException) -> None:
        logger.error("a background task of %s ended: %r", client_id, error)

    return ClientRuntime(
        bootstrap,
        client_id=client_id,
        request_timeout_ms=30_000,
        retry_backoff_ms=100,
        metadata_max_age_ms=300_000,
        world=world,
        on_crash=crashed,
    )


async def connect(cluster: ClientRuntime, patience_s: float) -> None:
    """`cluster.start()`, which gives up after 2 s: who is started while brokers change places needs more patience."""
    deadline = cluster.clock.monotonic() + patience_s
    while True:
        try:
            await cluster.start()
            return
        except NetworkError:
            if cluster.clock.monotonic() >= deadline:
                await cluster.close()
                raise
