"""Warnings about users and topics that do not exist. Quotas and access control lists may be set for them before they
do, so this is no error, but the name may be misspelled."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from contextlib import suppress

from minibroker.client.admin import Admin
from minibroker.client.cli.command_admin import did_you_mean
from minibroker.client.cli.terminal.output import LOOK_S
from minibroker.client.errors import TopicErrors
from minibroker.protocol.errors import BrokerError, ErrorCode, NetworkError, as_sentence
from minibroker.protocol.principal import ANONYMOUS


async def warnings_of_users(admin: Admin, users: Iterable[str | None], applies: str) -> list[str]:
    """Return a warning for each user without a password, and none if this cannot be found out: the caller may not have
    the right to see users. `applies`: such as "the quota applies"."""
    asked = [
        name for name in dict.fromkeys(users) if name not in (None, ANONYMOUS.name) and not _is_distinguished(name)
    ]
    if not asked:
        return []
    known: Iterable[str] | None = None
    with suppress(TimeoutError, BrokerError, NetworkError):
        async with asyncio.timeout(LOOK_S):
            known = await admin.describe_user_scram_credentials()
    if known is None:
        return []
    return [
        _warning(
            f"{name!r} is none of the users with a password (`minibroker users list`): {applies} if a client proves "
            "that name in another way, or once the user exists",
            did_you_mean([name], known),
        )
        for name in asked
        if name not in known
    ]


def _is_distinguished(name: str) -> bool:
    """Return whether the name is that of a certificate, such as CN=shop: such users have no password."""
    return "=" in name


async def warnings_of_topics(admin: Admin, topics: Sequence[str], applies: str) -> list[str]:
    """Return a warning for each topic that certainly does not exist."""
    known: Sequence[str] = ()
    unknown: list[str] = []
    with suppress(TimeoutError, BrokerError, NetworkError):
        async with asyncio.timeout(LOOK_S):
            known = await admin.list_topics(internal=True)
            try:
                await admin.describe_topics([name for name in topics if name not in known])
            except TopicErrors as failed:  # the others exist, but the caller may not know of them
                unknown = [
                    name
                    for name, error in failed.errors.items()
                    if isinstance(error, BrokerError) and error.code is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
                ]
    return [
        _warning(f"there is no topic {name!r}: {applies} once it is created", did_you_mean([name], known))
        for name in unknown
    ]


def _warning(text: str, question: str) -> str:
    return f"warning: {as_sentence(text)} {question}" if question else f"warning: {text}"
