"""An administrator whose requests go to brokers other than the controller, as a client may choose any broker."""

from __future__ import annotations

from typing import Any

from minibroker.client.admin import Admin
from minibroker.client.administering.requests import AdminRequests
from minibroker.client.cluster.connections import Purpose
from minibroker.protocol.apis import Api
from minibroker.protocol.connections.rpc import Connection


class IndirectRequests(AdminRequests):
    async def to_controller(self, api: Api[Any, Any]) -> Connection:
        cluster = self.runtime.metadata.cluster
        others = sorted(address for broker, address in cluster.brokers.items() if broker != cluster.controller_id)
        if not others:
            return await super().to_controller(api)
        return await self.runtime.connections.open(self.runtime.world.random.choice(others), Purpose.REQUESTS)


class IndirectAdmin(Admin):
    """An `Admin` whose changes of topics are forwarded if a broker other than the controller is known."""

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self._admin_requests = IndirectRequests(self._runtime, self._admin_requests.timeout_s)
