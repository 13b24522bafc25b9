"""The TLS of a broker's listeners: their networks, and contexts that follow the files of their certificates.

Certificates expire, and a broker that must restart for a new one is restarted too late. So the files are read again
every RELOAD_S, and if one has changed, new connections use new contexts; open ones stay as they are. Unusable files
are logged once, and the previous certificates stay in use: whoever replaces a file may be in the middle of it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any

from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.parsing import METRICS, listener_config
from minibroker.broker.settings.principal_rules import PrincipalRules
from minibroker.broker.settings.tls import TlsContexts, tls_contexts, tls_files
from minibroker.broker.settings.types import InvalidConfig
from minibroker.protocol.connections.tls import TlsNetwork
from minibroker.protocol.model import is_encrypted, uses_sasl
from minibroker.protocol.principal import Principal
from minibroker.protocol.world import Disk, Executor, Network, World

logger = logging.getLogger("minibroker.network")

RELOAD_S = 5.0


class _ListenerTls:
    """One listener's contexts, the rules for its principals, and its network."""

    def __init__(self, config: BrokerConfig, listener: str, world: World) -> None:
        """Raises InvalidConfig."""
        self.listener = listener
        self.rules = PrincipalRules(listener_config(config, listener).ssl_principal_mapping_rules)
        self._config = config
        self._disk: Disk = world.disk
        self._files = tls_files(config, listener, world.disk)
        self._contexts = tls_contexts(config, listener)
        self._complaint: str | None = None
        self.network = TlsNetwork(
            world.network,
            serving=lambda: self._contexts.serving,
            connecting=lambda: self._contexts.connecting,
        )

    @property
    def has_files(self) -> bool:
        return bool(self._files)

    def look(self) -> TlsContexts | None:
        """Return new contexts if the files have changed. Runs in a worker thread. Raises InvalidConfig."""
        files = tls_files(self._config, self.listener, self._disk)
        if files == self._files:
            return None
        contexts = tls_contexts(self._config, self.listener)
        self._files = files
        return contexts

    async def reload(self, executor: Executor) -> None:
        try:
            contexts = await executor.run(self.look)
        except InvalidConfig as error:
            if str(error) != self._complaint:
                self._complaint = str(error)
                logger.error("%s. The previous certificates stay in use", error)
            return
        self._complaint = None
        if contexts is not None:
            self._contexts = contexts
            logger.info("listener %s has new certificates for new connections", self.listener)


class Certificates:
    """The networks of the listeners of a broker. Raises InvalidConfig."""

    def __init__(self, config: BrokerConfig, world: World) -> None:
        protocols = config.security_protocols()
        if config.metrics_listener:
            protocols = protocols | {METRICS: config.metrics_listener_security_protocol}
        self._with_sasl = {name for name, protocol in protocols.items() if uses_sasl(protocol)}
        self._world = world
        self._inter_broker_listener = config.inter_broker_listener
        self._secured = {
            name: _ListenerTls(config, name, world) for name, protocol in protocols.items() if is_encrypted(protocol)
        }

    @property
    def has_files(self) -> bool:
        return any(secured.has_files for secured in self._secured.values())

    def network(self, listener: str | None = None) -> Network:
        """Return the network of connections that a listener accepts, and of those to it on other brokers. None: the
        listener for other brokers."""
        secured = self.secured(self._inter_broker_listener if listener is None else listener)
        return self._world.network if secured is None else secured

    def secured(self, listener: str) -> TlsNetwork | None:
        """Return the network of a listener with TLS; None for another one."""
        found = self._secured.get(listener)
        return None if found is None else found.network

    def principal_of(self, listener: str) -> Callable[[Mapping[str, Any] | None], Principal | None] | None:
        """Return the function that makes principals of certificates; None for a listener without TLS, and for one whose
        clients have principals by SASL."""
        found = self._secured.get(listener)
        return None if found is None or listener in self._with_sasl else found.rules.principal

    async def watch(self) -> None:
        """Follow the files until cancelled."""
        executor = self._world.new_executor("certificates")
        while True:
            await asyncio.sleep(RELOAD_S)
            for secured in self._secured.values():
                await secured.reload(executor)
