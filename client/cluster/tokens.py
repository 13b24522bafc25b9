"""The tokens of OAUTHBEARER, on the client's side: the user's function provides them, and messages say what is in them.

A token is a secret, so no message has it. Its claims are none, and say why brokers refuse it.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import inspect
import re
from collections.abc import Awaitable
from datetime import UTC, datetime

import msgspec

from minibroker.client.security import TokenProvider
from minibroker.client.shown import shown
from minibroker.protocol.errors import NetworkError
from minibroker.protocol.sasl.mechanisms import SaslError

_NAME = "sasl_oauth_token_provider"
_FOREIGN = re.compile(r"[^-_.a-zA-Z0-9]")
_SHOWN = ("sub", "iss", "aud", "exp")


async def token_of(provider: TokenProvider, timeout_s: float) -> str:
    """Call the user's function. Raises NetworkError if it raises or does not return in time, which is tried again, and
    SaslError for what is no token."""
    try:
        async with asyncio.timeout(timeout_s):
            token = await _called(provider)
    except TimeoutError:
        raise NetworkError(
            f"{_NAME} has not returned a token within {timeout_s:.3g} s: let it return one that it keeps, or give up "
            "earlier and raise"
        ) from None
    if not isinstance(token, str):
        raise SaslError(f"{_NAME} returned {_article(type(token).__name__)}, not a token: return the JWT as str")
    if not token:
        raise SaslError(f"{_NAME} returned an empty token: return a JWT")
    if foreign := _FOREIGN.search(token):
        raise SaslError(
            f"{_NAME} returned a token with {foreign[0]!r} at position {foreign.start()}, which no JWT has: return the "
            "token alone, without 'Bearer', quotes or the end of a line"
        )
    return token


async def _called(provider: TokenProvider) -> object:
    try:
        if inspect.iscoroutinefunction(provider):
            return await provider()
        answer, error = await asyncio.to_thread(_in_thread, provider)
        if error is not None:
            raise error
        return await answer if inspect.isawaitable(answer) else answer
    except Exception as error:  # of the user's own function
        raise NetworkError(
            f"{_NAME} raised {type(error).__name__}: {shown(str(error))}; it is called again for the next connection, "
            "so let it raise only for failures that pass"
        ) from error


def _in_thread(provider: TokenProvider) -> tuple[str | Awaitable[str] | None, Exception | None]:
    """A future cannot have StopIteration as its exception: the caller would wait for ever."""
    try:
        return provider(), None
    except Exception as error:  # noqa: BLE001 - of the user's own function; the caller raises it
        return None, error


def why_refused(token: str) -> str:
    """Return what helps to find out why brokers refuse the token: its claims, as they are."""
    claims = _claims(token)
    if claims is None:
        return f"the token is no JWT with claims: let {_NAME} return the token of your identity provider"
    told = ", ".join(f"{name} {_shown(name, claims[name])}" for name in _SHOWN if name in claims)
    absent = [name for name in ("sub", "exp") if name not in claims]
    without = f" and no {' and no '.join(absent)}" if absent else ""
    return (
        f"the token has {told or 'none of the usual claims'}{without}: brokers want one that is signed by a key that "
        "they know, for their audience and issuer, and has not expired; the broker's log says which of these fails"
    )


def _claims(token: str) -> dict[str, object] | None:
    parts = token.split(".")
    if len(parts) != 3:
        return None
    try:
        return msgspec.json.decode(
            base64.urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)), type=dict[str, object]
        )
    except (binascii.Error, ValueError, msgspec.MsgspecError):
        return None


def _shown(name: str, value: object) -> str:
    if name == "exp" and isinstance(value, int | float):
        try:
            return datetime.fromtimestamp(value, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        except (ValueError, OverflowError, OSError):
            pass
    return shown(value)


def _article(word: str) -> str:
    return f"{'an' if word[0].lower() in 'aeiou' else 'a'} {word}"
