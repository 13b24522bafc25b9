"""Users' passwords for SCRAM: DescribeUserScramCredentials and AlterUserScramCredentials (KIP-554).

A password is salted and hashed here; brokers receive and keep what verifies it, and never the password.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Sequence
from random import Random
from typing import Literal, NamedTuple

from minibroker.client.administering.requests import AdminRequests
from minibroker.client.errors import InvalidSetting, PartialFailure
from minibroker.client.settings import check_choice, check_integer, check_text
from minibroker.client.shown import shows_only
from minibroker.protocol import messages as m
from minibroker.protocol.apis import ALTER_USER_SCRAM_CREDENTIALS, DESCRIBE_USER_SCRAM_CREDENTIALS
from minibroker.protocol.errors import BrokerError, ErrorCode, MinibrokerError, error_of
from minibroker.protocol.sasl.scram import BY_NAME, LEAST_ITERATIONS, MOST_ITERATIONS, SALT_BYTES, salted_password

ScramMechanism = Literal["SCRAM-SHA-256", "SCRAM-SHA-512"]


class ScramCredentialInfo(NamedTuple):
    mechanism: str
    iterations: int


@shows_only("user", "mechanism", "iterations")
class UserScramCredentialUpsertion(NamedTuple):
    """A password for a mechanism, in place of the one before, if any."""

    user: str
    mechanism: ScramMechanism
    password: str
    iterations: int = LEAST_ITERATIONS

    def __repr__(self) -> str:
        return f"UserScramCredentialUpsertion({self.user!r}, {self.mechanism!r}, iterations={self.iterations})"


class UserScramCredentialDeletion(NamedTuple):
    user: str
    mechanism: ScramMechanism


class UserErrors(PartialFailure[str, tuple[ScramCredentialInfo, ...]]):
    """Some users of a request failed; `errors` is by name. The others succeeded."""


Change = UserScramCredentialUpsertion | UserScramCredentialDeletion


async def describe(requests: AdminRequests, users: Iterable[str] | None) -> dict[str, tuple[ScramCredentialInfo, ...]]:
    """See `Admin.describe_user_scram_credentials`."""
    names = None if users is None else [_checked_user(user) for user in dict.fromkeys(users)]
    if names is not None and not names:
        return {}
    body = m.DescribeUserScramCredentialsRequest(None if names is None else [m.ScramUserName(name) for name in names])
    answer = await requests.ask(None, DESCRIBE_USER_SCRAM_CREDENTIALS, body)
    if answer.error_code:
        raise _problem(answer.error_code, answer.error_message)
    results: dict[str, tuple[ScramCredentialInfo, ...]] = {}
    errors: dict[str, MinibrokerError] = {}
    for result in answer.results:
        if result.error_code:
            errors[result.user] = _problem(result.error_code, result.error_message)
        else:
            results[result.user] = tuple(
                ScramCredentialInfo(_name_of(info.mechanism), info.iterations) for info in result.credential_infos
            )
    if errors:
        raise UserErrors(errors, results)
    return results


async def alter(requests: AdminRequests, changes: Iterable[Change]) -> None:
    """See `Admin.alter_user_scram_credentials`."""
    asked = list(changes)
    for change in asked:
        _check(change)
    if len({(change.user, change.mechanism) for change in asked}) < len(asked):
        raise InvalidSetting("changes", asked, "name each user and mechanism once")
    if not asked:
        return
    # Thousands of hashes on purpose: the loop must not wait for them.
    prepared = await asyncio.to_thread(_Alteration, asked, requests.runtime.world.random)
    errors = await requests.at_controller(prepared)
    if errors:
        raise UserErrors(errors)


class _Alteration:
    """The changes of one call, salted and hashed."""

    api = ALTER_USER_SCRAM_CREDENTIALS
    final: Collection[ErrorCode] = ()
    is_prepared = True
    may_yet = "They may yet be changed; to ask for it again does no harm."

    def __init__(self, changes: Iterable[Change], random: Random) -> None:
        self._deletions: list[m.ScramCredentialDeletion] = []
        self._upsertions: list[m.ScramCredentialUpsertion] = []
        self._attempts = 0
        for change in changes:
            number = BY_NAME[change.mechanism]
            if isinstance(change, UserScramCredentialDeletion):
                self._deletions.append(m.ScramCredentialDeletion(change.user, number))
                continue
            salt = random.randbytes(SALT_BYTES)
            try:
                hashed = salted_password(number, change.password, salt, change.iterations)
            except ValueError as error:
                raise InvalidSetting("password", "...", str(error)) from None
            self._upsertions.append(m.ScramCredentialUpsertion(change.user, number, change.iterations, salt, hashed))

    def names(self) -> list[str]:
        deleted = [change.name for change in self._deletions]
        return list(dict.fromkeys([*deleted, *(change.name for change in self._upsertions)]))

    def request(
        self, names: Sequence[str], timeout_ms: int, controller_epoch: int
    ) -> m.AlterUserScramCredentialsRequest:
        self._attempts += 1
        return m.AlterUserScramCredentialsRequest(
            [change for change in self._deletions if change.name in names],
            [change for change in self._upsertions if change.name in names],
        )

    def results(self, response: m.AlterUserScramCredentialsResponse) -> dict[str, tuple[int, str]]:
        found = {result.user: (result.error_code, result.error_message) for result in response.results}
        if self._attempts > 1:  # an earlier attempt, whose answer was lost, may have deleted it
            for user, (code, _) in found.items():
                if code == ErrorCode.RESOURCE_NOT_FOUND:
                    found[user] = (ErrorCode.NONE, "")
        return found


def _checked_user(user: str) -> str:
    if not check_text("user", user):
        raise InvalidSetting("user", user, "give a name that is not empty")
    return user


def _check(change: object) -> None:
    if not isinstance(change, Change):
        rule = "give UserScramCredentialUpsertion(user, mechanism, password) or UserScramCredentialDeletion(...)"
        raise InvalidSetting("changes", type(change).__name__, rule)
    _checked_user(change.user)
    check_choice("mechanism", change.mechanism, list(BY_NAME))
    if isinstance(change, UserScramCredentialUpsertion):
        if not isinstance(change.password, str) or not change.password:
            raise InvalidSetting("password", "...", "give text that is not empty")
        check_integer("iterations", change.iterations, LEAST_ITERATIONS, MOST_ITERATIONS)


def _name_of(number: int) -> str:
    return next((name for name, known in BY_NAME.items() if known == number), f"unknown mechanism {number}")


def _problem(code: int, message: str) -> BrokerError:
    return BrokerError(error_of(code), message, is_complete=bool(message))
