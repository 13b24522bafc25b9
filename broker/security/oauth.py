"""The tokens of OAUTHBEARER: JWTs that are signed by a key of the identity provider (RFC 7519, RFC 7517).

The keys are read from a file or a web server when the broker starts, every hour, and when a token names an unknown one:
providers replace keys. Strangers can name unknown keys as often as they like, so that happens at most once per second.
Tokens without a signature, and those signed by a shared secret, are never accepted. PyJWT (the extra `oauth`) does the
cryptography; times are checked here, by the World's clock.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import urllib.request
from typing import Any, NamedTuple

import jwt

from minibroker.protocol.sasl.mechanisms import Authenticated
from minibroker.protocol.sasl.oauthbearer import TokenRefused, UnknownKey
from minibroker.protocol.world import World

logger = logging.getLogger("minibroker.network")

ALGORITHMS = ["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA"]
REFRESH_S = 3_600.0
"""Kafka's default of sasl.oauthbearer.jwks.endpoint.refresh.ms."""
LEAST_REFRESH_S = 1.0
FETCH_TIMEOUT_S = 10.0
MAX_KEYS_BYTES = 1024 * 1024
LONGEST_USER = 1_000
_FILE = "file:"

UNUSABLE = (jwt.PyJWTError, ValueError, TypeError, KeyError, RecursionError)
"""What PyJWT raises for a token or a key that is none."""


class TokenRules(NamedTuple):
    audience: str | None
    issuer: str | None
    user_claim: str
    skew_s: int


class SigningKeys:
    """The keys at a URL, `file:` or `http(s):`."""

    def __init__(self, url: str, world: World) -> None:
        self.url = url
        self._disk = world.disk
        self._monotonic = world.clock.monotonic
        self._executor = world.new_executor("signing keys")
        self._keys: dict[str | None, jwt.PyJWK] = {}
        self._refreshed_at: float | None = None
        self._refreshing = asyncio.Lock()

    def find(self, key_id: str | None) -> jwt.PyJWK:
        """Raises UnknownKey, or TokenRefused if the keys have just been read."""
        if key_id is None and len(self._keys) == 1:
            return next(iter(self._keys.values()))
        key = self._keys.get(key_id)
        if key is not None:
            return key
        if self._refreshed_at is None or self._monotonic() - self._refreshed_at >= LEAST_REFRESH_S:
            raise UnknownKey
        raise TokenRefused("the token is signed by an unknown key")

    async def refresh(self) -> None:
        """Read the keys, unless that has just been done. If they cannot be read, the previous ones stay in use."""
        async with self._refreshing:
            now = self._monotonic()
            if self._refreshed_at is not None and now - self._refreshed_at < LEAST_REFRESH_S:
                return
            try:
                keys = await self._executor.run(self._read)
            except (OSError, *UNUSABLE) as error:
                logger.error(
                    "the keys at %s cannot be read (%s), so tokens that they sign are refused; check "
                    "sasl.oauthbearer.jwks.endpoint.url",
                    self.url,
                    error,
                )
            else:
                self._keys = keys
            self._refreshed_at = self._monotonic()

    async def follow(self) -> None:
        """Read the keys now and then, until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(REFRESH_S)

    def _read(self) -> dict[str | None, jwt.PyJWK]:
        """Runs in a worker thread. Raises OSError, and UNUSABLE."""
        if self.url.startswith(_FILE):
            data = self._disk.read_file("/" + self.url.removeprefix(_FILE).lstrip("/"))
        else:
            with urllib.request.urlopen(self.url, timeout=FETCH_TIMEOUT_S) as response:  # the scheme was checked
                data = response.read(MAX_KEYS_BYTES)
        found: dict[str | None, jwt.PyJWK] = {}
        for each in json.loads(data)["keys"]:
            if each.get("use", "sig") == "sig" and each.get("kty") != "oct":
                found[each.get("kid")] = jwt.PyJWK(each)
        return found


class TokenValidator:
    """Decides who a token is for."""

    def __init__(self, keys: SigningKeys, rules: TokenRules, world: World) -> None:
        self._keys = keys
        self._rules = rules
        self._wall_ms = world.clock.wall_ms

    def validate(self, token: str) -> Authenticated:
        """Raises TokenRefused, UnknownKey."""
        rules = self._rules
        try:
            key = self._keys.find(jwt.get_unverified_header(token).get("kid"))
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=ALGORITHMS,
                audience=rules.audience,
                issuer=rules.issuer,
                options={
                    "require": ["exp"],
                    "verify_aud": rules.audience is not None,
                    "verify_exp": False,
                    "verify_nbf": False,
                    "verify_iat": False,
                },
            )
            expires_at_s, begins_at_s = float(claims["exp"]) + rules.skew_s, float(claims.get("nbf", 0))
        except UNUSABLE as error:
            raise TokenRefused(f"the token is refused: {type(error).__name__}") from None
        now_s = self._wall_ms() / 1_000
        if not (math.isfinite(expires_at_s) and now_s < expires_at_s):
            raise TokenRefused("the token has expired")
        if not begins_at_s - rules.skew_s <= now_s:
            raise TokenRefused("the token is not valid yet")
        user = claims.get(rules.user_claim)
        if not isinstance(user, str) or not 0 < len(user) <= LONGEST_USER:
            raise TokenRefused(f"the token has no user in its claim {rules.user_claim}")
        return Authenticated(user, expires_at_s=expires_at_s)
