"""The heart of a group member has the credentials of its consumer."""

from __future__ import annotations

import asyncio

from minibroker.client.group.heart import with_tokens_of
from minibroker.client.security import Credentials, Protection


async def test_a_coroutine_that_provides_tokens_runs_in_the_loop_of_the_user() -> None:
    users = asyncio.get_running_loop()
    lock = asyncio.Lock()

    async def provide() -> str:
        assert asyncio.get_running_loop() is users
        async with lock:
            return "a token"

    protection = with_tokens_of(users, Protection(sasl=Credentials("OAUTHBEARER", token_provider=provide)))
    assert protection.sasl is not None
    provider = protection.sasl.token_provider

    async def ask() -> object:
        assert provider is not None
        return await provider()  # type: ignore[misc]

    assert await asyncio.to_thread(asyncio.run, ask()) == "a token"
