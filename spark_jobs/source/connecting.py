"""The client of Spark's readers, on the driver and in tasks, which connects patiently."""

from __future__ import annotations

import logging

from minibroker.client.cluster.runtime import ClientRuntime
from minibroker.client.security import Security, protection
from minibroker.protocol.errors import NetworkError
from minibroker.protocol.world import World

logger = logging.getLogger(__name__)

PATIENCE_S = 120.0
"""The time for which a leader may be missing. An exception ends a task's attempt, or on the driver the query."""
FIRST_CONTACT_PATIENCE_S = 15.0
"""The time in which the driver must reach a broker at the start of a query, so that a mistyped address is reported."""


def new_cluster(bootstrap: str, client_id: str, world: World | None, security: Security | None = None) -> ClientRuntime:
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
        protection=protection(client_id, security or {}),
    )


async def connect(cluster: ClientRuntime, patience_s: float) -> None:
    """Repeat `cluster.start()`, which gives up after 2 s, for `patience_s`: brokers may be failing over."""
    deadline = cluster.clock.monotonic() + patience_s
    while True:
        try:
            await cluster.start()
            return
        except NetworkError:
            if cluster.clock.monotonic() >= deadline:
                await cluster.close()
                raise
