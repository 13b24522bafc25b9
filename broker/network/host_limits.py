"""The limits of single hosts (`max.connections.per.ip.overrides`), whose names are looked up once.

An address is limited at once. A name is looked up in the background, until that succeeds: a resolver that is down must
hold up neither the start of a broker nor a change of its other settings. (Kafka blocks, and does not start.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from ipaddress import ip_address

from minibroker.protocol.world import Network

logger = logging.getLogger("minibroker.network")

RETRY_S = 10.0
"""Seconds between two look-ups of a name."""


class HostLimits:
    def __init__(self, network: Network, apply: Callable[[Mapping[str, int]], None]) -> None:
        """`apply` receives the limits by address, again with each name that was found."""
        self._network = network
        self._apply = apply
        self._limits: Mapping[str, int] = {}
        self._looking_up: list[asyncio.Task[None]] = []

    def configure(self, limits: Mapping[str, int]) -> None:
        if limits == self._limits:
            return
        self._cancel()
        self._limits = limits
        of_addresses: dict[str, int] = {}
        for host, limit in limits.items():
            try:
                of_addresses[str(ip_address(host))] = limit
            except ValueError:
                looking_up = self._look_up(host, limit, of_addresses)
                self._looking_up.append(
                    asyncio.get_running_loop().create_task(looking_up, name=f"look-up of {host}, whose limit is set")
                )
        self._apply(of_addresses)

    async def close(self) -> None:
        tasks = self._looking_up
        self._cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _cancel(self) -> None:
        for task in self._looking_up:
            task.cancel()
        self._looking_up = []

    async def _look_up(self, host: str, limit: int, of_addresses: dict[str, int]) -> None:
        has_failed = False
        while True:
            try:
                async with asyncio.timeout(RETRY_S):
                    addresses = await self._network.addresses(host)
                break
            except OSError as error:
                if not has_failed:
                    logger.warning(
                        "max.connections.per.ip.overrides names %s, which is not known (%s): its limit does not apply "
                        "until it is found; give its address instead",
                        host,
                        error.strerror or "no answer",
                    )
                has_failed = True
            await asyncio.sleep(RETRY_S)
        for address in addresses:
            of_addresses.setdefault(address, limit)
        self._apply(of_addresses)
