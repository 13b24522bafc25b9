"""Quotas in ZooKeeper: reading them when they change, and changing them (Kafka's ZkAdminManager)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from minibroker.broker.quotas.entities import (
    CLIENTS,
    QuotaEntity,
    QuotaKey,
    Quotas,
    as_text,
    entity_at,
    from_texts,
    path_of,
)
from minibroker.protocol import znodes
from minibroker.protocol.world import Create, NodeExists, NoNode, Operation, SetData, ZooKeeperSession
from minibroker.protocol.znodes import MalformedZnode

logger = logging.getLogger("minibroker.config")

READS_AT_ONCE = 100

AllQuotas = dict[QuotaEntity, Mapping[QuotaKey, float]]


class QuotaReader:
    """Keeps the quotas as ZooKeeper has them, and passes each change on. An invalid entry is logged, and counts as
    none."""

    def __init__(self, on_change: Callable[[Quotas], None]) -> None:
        self._on_change = on_change
        self._quotas: AllQuotas = {}

    async def read(self, path: str | None, session: ZooKeeperSession) -> None:
        """Read the quotas at this path, or for None all quotas. Raises ZooKeeperError."""
        if path is None:
            quotas = await read_all(session)
        else:
            entity = entity_at(path)
            if entity is None:
                logger.warning("%s is not the path of a user, client or address, so it has no quotas", path[:200])
                return
            (node,) = await session.get_all([path])
            quotas = {**self._quotas, entity: {} if node is None else _decoded(path, node[0])}
        quotas = {entity: found for entity, found in quotas.items() if found}
        if quotas != self._quotas:
            self._quotas = quotas
            logger.info("the quotas of users and clients have changed: %d have one", len(quotas))
            self._on_change(quotas)


async def read_all(session: ZooKeeperSession) -> AllQuotas:
    """Return the quotas of all entities; those without one may be among them. Raises ZooKeeperError."""
    paths = [f"{znodes.CLIENT_CONFIGS}/{name}" for name in await _children(session, znodes.CLIENT_CONFIGS)]
    for user in await _children(session, znodes.USER_CONFIGS):
        of_user = f"{znodes.USER_CONFIGS}/{user}"
        clients = await _children(session, f"{of_user}/{CLIENTS}")
        paths += [of_user, *(f"{of_user}/{CLIENTS}/{name}" for name in clients)]
    paths += [f"{znodes.IP_CONFIGS}/{name}" for name in await _children(session, znodes.IP_CONFIGS)]
    found: AllQuotas = {}
    for first in range(0, len(paths), READS_AT_ONCE):
        some = paths[first : first + READS_AT_ONCE]
        for path, node in zip(some, await session.get_all(some), strict=True):
            entity = entity_at(path)
            if entity is not None and node is not None:
                found[entity] = _decoded(path, node[0])
    return found


class StoredQuotas(NamedTuple):
    """The settings of an entity, with those that are not quotas. `version` is None if it has no znode."""

    texts: Mapping[str, str]
    version: int | None


async def find(session: ZooKeeperSession, entity: QuotaEntity) -> StoredQuotas:
    """Raises ZooKeeperError, MalformedZnode."""
    path = path_of(entity)
    try:
        data, stat = await session.get(path)
    except NoNode:
        return StoredQuotas({}, None)
    return StoredQuotas(znodes.decode_config(path, data) if data else {}, stat.version)


async def write(session: ZooKeeperSession, entity: QuotaEntity, found: StoredQuotas, texts: Mapping[str, str]) -> None:
    """Replace the settings that were found, and notify all brokers. Raises ZooKeeperError: MultiFailed if somebody
    else has changed them."""
    path = path_of(entity)
    if entity.user is not None and entity.client_id is not None and found.version is None:
        of_user = path_of(QuotaEntity(entity.user))
        for parent, data in ((of_user, znodes.encode_config({})), (f"{of_user}/{CLIENTS}", b"")):
            with suppress(NodeExists):
                await session.create(parent, data)
    data = znodes.encode_config(texts)
    change: Operation = Create(path, data) if found.version is None else SetData(path, data, found.version)
    notification = Create(znodes.CONFIG_CHANGE_PREFIX, znodes.encode_config_change(path), sequence=True)
    await session.multi([change, notification])


def with_changes(texts: Mapping[str, str], changes: Mapping[QuotaKey, float | None]) -> dict[str, str]:
    """Return the settings after the changes. None removes a quota."""
    kept = {name: text for name, text in texts.items() if name not in {key.value for key in changes}}
    return kept | {key.value: as_text(key, value) for key, value in changes.items() if value is not None}


async def _children(session: ZooKeeperSession, path: str) -> list[str]:
    try:
        return await session.children(path)
    except NoNode:
        return []


def _decoded(path: str, data: bytes) -> dict[QuotaKey, float]:
    try:
        return from_texts(znodes.decode_config(path, data)) if data else {}
    except (MalformedZnode, ValueError) as error:
        logger.error("the quotas in %s are invalid and do not apply: %s", path, error)
        return {}
