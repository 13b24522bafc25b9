"""The credentials of SCRAM in ZooKeeper, in Kafka's format, beside the quotas of the same users.

    /config/users/alice   "SCRAM-SHA-256": "salt=...,stored_key=...,server_key=...,iterations=4096"

A broker keeps all of them in memory, as it keeps the quotas, and follows the same notifications.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import unquote

from minibroker.protocol import znodes
from minibroker.protocol.sasl.scram import BY_NAME, ScramCredential, ScramMechanism
from minibroker.protocol.world import ConnectionLoss, NoNode, SessionExpired, ZooKeeperSession
from minibroker.protocol.znodes import MalformedZnode
from minibroker.protocol.zookeeper_reads import catch_up

logger = logging.getLogger("minibroker.config")

READS_AT_ONCE = 100
RETRY_S = 0.05

Credentials = dict[str, Mapping[ScramMechanism, ScramCredential]]
"""By user."""


class ScramCredentials:
    """The credentials as this broker knows them. An invalid entry is logged, and counts as none."""

    def __init__(self) -> None:
        self._credentials: Credentials = {}

    def get(self, user: str, mechanism: ScramMechanism) -> ScramCredential | None:
        return self._credentials.get(user, {}).get(mechanism)

    async def load(self, sessions: Callable[[], Awaitable[ZooKeeperSession]]) -> None:
        """Read all before the broker serves. `sessions` must open a new session if the first has expired."""
        while True:
            try:
                session = await sessions()
                await catch_up(session)
                await self.read(None, session)
                return
            except (ConnectionLoss, SessionExpired):
                await asyncio.sleep(RETRY_S)

    async def read(self, path: str | None, session: ZooKeeperSession) -> None:
        """Read the credentials of the user at this path, or for None all. Raises ZooKeeperError."""
        if path is None:
            self._credentials = await read_all(session)
            return
        user = _user_at(path)
        if user is not None:
            (node,) = await session.get_all([path])
            self._credentials.pop(user, None)
            if node is not None and (found := _decoded(path, node[0])):
                self._credentials[user] = found


async def read_all(session: ZooKeeperSession) -> Credentials:
    """Return the credentials of all users who have one. Raises ZooKeeperError."""
    try:
        names = await session.children(znodes.USER_CONFIGS)
    except NoNode:
        return {}
    paths = [f"{znodes.USER_CONFIGS}/{name}" for name in names]
    found: Credentials = {}
    for first in range(0, len(paths), READS_AT_ONCE):
        some = paths[first : first + READS_AT_ONCE]
        for path, node in zip(some, await session.get_all(some), strict=True):
            user = _user_at(path)
            if user is not None and node is not None and (credentials := _decoded(path, node[0])):
                found[user] = credentials
    return found


def from_texts(texts: Mapping[str, str]) -> dict[ScramMechanism, ScramCredential]:
    """Return the credentials among a user's settings, which may have others. Raises ValueError, which shows none."""
    return {BY_NAME[name]: _from_text(name, text) for name, text in texts.items() if name in BY_NAME}


def as_text(credential: ScramCredential) -> str:
    """Kafka's ScramCredentialUtils.credentialToString."""
    salt, stored_key, server_key = (base64.b64encode(part).decode() for part in credential[:3])
    return f"salt={salt},stored_key={stored_key},server_key={server_key},iterations={credential.iterations}"


def _from_text(name: str, text: str) -> ScramCredential:
    parts = dict(part.strip().partition("=")[::2] for part in text.split(","))
    try:
        salt, stored_key, server_key = (
            base64.b64decode(parts[each], validate=True) for each in ("salt", "stored_key", "server_key")
        )
        return ScramCredential(salt, stored_key, server_key, int(parts["iterations"]))
    except (KeyError, ValueError, binascii.Error):
        raise ValueError(
            f"the credential of {name} is not salt=...,stored_key=...,server_key=...,iterations=..."
        ) from None


def _user_at(path: str) -> str | None:
    """Return the user of a path; None: it is not one of a user alone, or it is the default's, who is nobody."""
    name = path.removeprefix(f"{znodes.USER_CONFIGS}/")
    return None if name == path or "/" in name or name == znodes.DEFAULT_ENTITY else unquote(name)


def _decoded(path: str, data: bytes) -> dict[ScramMechanism, ScramCredential]:
    try:
        return from_texts(znodes.decode_config(path, data)) if data else {}
    except MalformedZnode:
        logger.error("%s is malformed, and its credentials do not apply", path)  # the error may show a part of them
    except ValueError as error:
        logger.error("the credentials in %s are invalid and do not apply: %s", path, error)
    return {}
