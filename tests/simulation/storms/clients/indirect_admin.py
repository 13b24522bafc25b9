"""An administrator that asks any broker but the controller, as a client does that is told to ask any."""

from __future__ import annotations

from typing import Any

from minibroker.client.admin import Admin
from minibroker.client.cluster.connections import Purpose
from minibroker.protocol.apis import Api
from minibroker.protocol.connections.rpc import Connection


class IndirectAdmin(Admin):
    """Every change of topics is forwarded, as long as another broker than the controller is known."""

    async def _controller(self, api: Api[Any, Any]) -> Connection:
        cluster = self._runtime.metadata.cluster
        others = sorted(address for broker, address in cluster.brokers.items() if broker != cluster.controller_id)
        if not others:
            return await super()._controller(api)
        return await self._runtime.connections.open(self._runtime.world.random.choice(others), Purpose.REQUESTS)
