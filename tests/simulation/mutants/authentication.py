"""Planted bugs of SASL and of ACLs: clients that are let in, stay in, or may do something without a right to it."""

from __future__ import annotations

import math
from typing import Any

from minibroker.broker.security.acl_store import AclStore
from minibroker.broker.security.sasl import SaslState
from minibroker.protocol.change_watcher import ChangeWatcher
from minibroker.protocol.sasl.mechanisms import Authenticated, SaslError
from minibroker.protocol.sasl.plain import PlainServer
from minibroker.protocol.sasl.scram import ScramServer
from tests.simulation.mutants.planting import Patches, mutant


@mutant("KIP-368", "a session outlives its token")
def session_outlives_its_token(patches: Patches) -> None:
    @patches.instead_of(SaslState, "_lifetime_ms")
    def lifetime_ms(original: Any, self: SaslState, answer: Any, wall_s: float) -> int:
        return int(original(self, answer._replace(expires_at_s=None), wall_s))


@mutant("KIP-368", "an authentication that is repeated may change the user")
def another_user_after_authenticating_again(patches: Patches) -> None:
    @patches.instead_of(SaslState, "authenticate")
    def authenticate(original: Any, self: SaslState, message: bytes, now: float, wall_s: float) -> Any:
        principal, self._principal = self._principal, type(self._principal)()
        outcome = original(self, message, now, wall_s)
        if outcome.principal is None:
            self._principal = principal
        return outcome


@mutant("CVE-2024-56128", "a client of SCRAM need not prove that it knows the password")
def proof_of_scram_not_needed(patches: Patches) -> None:
    @patches.instead_of(ScramServer, "respond")
    def respond(original: Any, self: ScramServer, message: bytes) -> Any:
        try:
            return original(self, message)
        except SaslError:
            if not self._user:
                raise
            return Authenticated(self._user)


@mutant("the password of nobody", "an unknown user of PLAIN has any password")
def unknown_user_of_plain(patches: Patches) -> None:
    @patches.instead_of(PlainServer, "respond")
    def respond(original: Any, self: PlainServer, message: bytes) -> Any:
        known, password = self._password_of, message.rpartition(b"\0")[2]
        self._password_of = lambda user: known(user) or password.decode()
        return original(self, message)


@mutant("KIP-368", "a session has no end for a client that does not authenticate itself again")
def session_never_ends(patches: Patches) -> None:
    @patches.instead_of(SaslState, "why_closed")
    def why_closed(original: Any, self: SaslState, api_key: int, now: float) -> Any:
        return original(self, api_key, -math.inf)


@mutant("the deaf broker", "a broker hears of no ACL any more once its session of ZooKeeper has expired")
def acls_are_not_watched_again(patches: Patches) -> None:
    @patches.instead_of(ChangeWatcher, "_state_changed")
    def state_changed(original: Any, self: ChangeWatcher, *arguments: Any) -> None:
        if not isinstance(self, AclStore):
            original(self, *arguments)
