"""What Producer, Consumer and Admin have in common: a World, connections, metadata, background tasks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from client.connections import Connections
from client.errors import InvalidSetting
from client.metadata import Metadata
from client.settings import check_ms, parse_bootstrap
from client.tasks import BackgroundTasks
from protocol.real_world import RealWorld
from protocol.world import World

START_PATIENCE_S = 2.0
"""How long `start` tries to reach any broker: a cluster that is being started answers within that time, and who
mistyped an address should not wait longer."""


class Cluster:
    """One client's view of a cluster. `on_crash` is told if one of its tasks dies of a bug.

    Raises InvalidSetting from the constructor, which starts nothing.
    """

    def __init__(
        self,
        bootstrap: str | Sequence[str],
        *,
        client_id: str,
        request_timeout_ms: float,
        retry_backoff_ms: float,
        metadata_max_age_ms: float,
        world: World | None,
        on_crash: Callable[[BaseException], None],
    ) -> None:
        addresses = parse_bootstrap(bootstrap)
        if not isinstance(client_id, str) or len(client_id) > 249:
            raise InvalidSetting("client_id", client_id, "give a string of at most 249 characters")
        self.request_timeout_s = check_ms("request_timeout_ms", request_timeout_ms, lowest=1)
        self.retry_backoff_s = check_ms("retry_backoff_ms", retry_backoff_ms, lowest=1)
        max_age_s = check_ms("metadata_max_age_ms", metadata_max_age_ms, lowest=1)
        self._own_world: RealWorld | None = None
        if world is None:
            world = self._own_world = RealWorld()
        self.world = world
        self.clock = self.world.clock
        self.tasks = BackgroundTasks(on_crash)
        self.connections = Connections(self.world, self.tasks, client_id=client_id, backoff_s=self.retry_backoff_s)
        self.metadata = Metadata(
            self.world,
            self.connections,
            addresses,
            request_timeout_s=self.request_timeout_s,
            retry_backoff_s=self.retry_backoff_s,
            max_age_s=max_age_s,
        )

    async def start(self) -> None:
        """Reach a broker and begin to keep metadata. Raises NetworkError naming every address and the reason."""
        await self.metadata.first_refresh(min(START_PATIENCE_S, self.request_timeout_s))
        self.tasks.start(self.metadata.run(), "metadata")

    async def close(self) -> None:
        """End the tasks, then close the connections."""
        await self.tasks.close()
        await self.connections.close()
        if self._own_world is not None:
            self._own_world.close()
