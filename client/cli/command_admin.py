"""The admin client of commands. It completes errors by the command line: with similar names for a name that does not
exist, and with all rights that the command needs. A broker names those of one request."""

from __future__ import annotations

import asyncio
import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from difflib import get_close_matches
from types import TracebackType
from typing import NamedTuple

from minibroker.client.admin import Admin
from minibroker.client.administering.requests import BrokerDescription
from minibroker.client.cli.terminal import security
from minibroker.client.cli.terminal.output import API_TIMEOUT_MS, LOOK_S
from minibroker.client.cluster.connections import Purpose
from minibroker.client.errors import PartialFailure, acl_commands
from minibroker.client.settings import Address
from minibroker.protocol.apis import DESCRIBE_HEALTH
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, MinibrokerError, NetworkError
from minibroker.protocol.messages import DescribeHealthRequest

_REFUSALS = (
    ErrorCode.TOPIC_AUTHORIZATION_FAILED,
    ErrorCode.GROUP_AUTHORIZATION_FAILED,
    ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
    ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
)
_ADVICE = re.compile(r"`minibroker acls add --allow-principal (?:'[^']*'|\S+) ([^`]*)`")
_INCLUDE_DESCRIBE = {"Read", "Write", "Delete", "Alter"}
_MOST_SHOWN = 3
_LONGEST_COMPARED = 300
"""Characters of a name. To compare two names takes a time that grows with the product of their lengths."""


class Names(NamedTuple):
    """The names that a command line has."""

    topics: Sequence[str] = ()
    groups: Sequence[str] = ()
    transactional_ids: Sequence[str] = ()
    users: Sequence[str] = ()


class CommandAdmin(Admin):
    """`typed`: the names of the command line. An error inside `async with` that one of them does not exist gets a note
    with similar names that exist, which `run_app` prints. `needs`: options of `minibroker acls add` for each resource,
    which together allow the whole command. If a broker refuses a request, the error names all of them, so that one
    round with an administrator is enough."""

    def __init__(self, bootstrap: str, typed: Names, needs: Sequence[str] = ()) -> None:
        super().__init__(
            bootstrap, client_id="minibroker-cli", default_api_timeout_ms=API_TIMEOUT_MS, **security.chosen()
        )
        self._typed = typed
        self._needs = needs

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, MinibrokerError):
            with suppress(TimeoutError, MinibrokerError):  # the error itself matters more
                async with asyncio.timeout(LOOK_S):
                    await self._look_for_similar(error)
        await super().__aexit__(kind, error, traceback)
        refused = None if error is None else _refused(error)
        if refused is not None and self._needs:
            raise _with_all_rights(refused, self._needs) from None

    async def _look_for_similar(self, error: MinibrokerError) -> None:
        codes = _codes_of(error)
        if ErrorCode.UNKNOWN_TOPIC_OR_PARTITION in codes and self._typed.topics:
            suggest(error, self._typed.topics, await self.list_topics(internal=True))
        if ErrorCode.GROUP_ID_NOT_FOUND in codes and self._typed.groups:
            await self.suggest_groups(error)
        if ErrorCode.TRANSACTIONAL_ID_NOT_FOUND in codes and self._typed.transactional_ids:
            known = await self.list_transactions()
            suggest(error, self._typed.transactional_ids, (each.transactional_id for each in known))
        if ErrorCode.RESOURCE_NOT_FOUND in codes and self._typed.users:
            suggest(error, self._typed.users, await self.describe_user_scram_credentials())

    async def zookeeper_away_s(self, brokers: Iterable[BrokerDescription]) -> dict[int, float]:
        """Return for how many seconds brokers have had no ZooKeeper, by id. Brokers that have it are left out, and
        those that do not answer."""
        connections = self._requests.runtime.connections
        away_s: dict[int, float] = {}

        async def ask(broker: BrokerDescription) -> None:
            with suppress(TimeoutError, NetworkError, BrokerError, InvalidMessage):
                async with asyncio.timeout(LOOK_S):
                    connection = await connections.open(Address(broker.host, broker.port), Purpose.REQUESTS)
                    health = await connection.request(DESCRIBE_HEALTH, DescribeHealthRequest(), timeout_s=LOOK_S)
                    if health.zookeeper_away_ms >= 0:
                        away_s[broker.id] = health.zookeeper_away_ms / 1_000

        await asyncio.gather(*map(ask, brokers))
        return away_s

    async def suggest_groups(self, error: MinibrokerError) -> None:
        """Add the groups whose names are similar to those of the command line."""
        suggest(error, self._typed.groups, (each.group for each in await self.list_groups()))


def suggest(error: Exception, typed: Iterable[str], known: Iterable[str]) -> None:
    """Add a note with the known names that are similar to typed ones, if a typed one is unknown."""
    if question := did_you_mean(typed, known):
        error.add_note(question)


def did_you_mean(typed: Iterable[str], known: Iterable[str]) -> str:
    """Return a question with the known names that are similar to typed ones that are unknown; empty if none is."""
    known = {name for name in known if len(name) <= _LONGEST_COMPARED}
    unknown = [name for name in typed if name not in known and len(name) <= _LONGEST_COMPARED]
    similar = {close: None for name in unknown for close in get_close_matches(name, sorted(known), _MOST_SHOWN)}
    return f"Did you mean {' or '.join(repr(name) for name in similar)}?" if similar else ""


def _refused(error: BaseException) -> BrokerError | None:
    """Return the first error if access control has refused everything that failed; None otherwise."""
    match error:
        case BrokerError(code=code) if code in _REFUSALS:
            return error
        case PartialFailure(errors=errors) if errors and all(map(_refused, errors.values())):
            return _refused(next(iter(errors.values())))
        case _:
            return None


def _with_all_rights(refused: BrokerError, needs: Sequence[str]) -> BrokerError:
    principal = security.principal()
    advice, operation = _ADVICE.search(refused.detail), refused.detail.partition(" may not ")[2]
    if advice is not None and not any(_covers(each, advice[1], operation) for each in needs):
        needs = [*needs, advice[1]]
    what, is_advice, _ = refused.detail.partition(": an administrator can allow it with ")
    if not is_advice:
        what = f"{principal or 'this client'} may not do all that the command needs"
    commands = acl_commands(principal, needs)
    return BrokerError(
        refused.code, f"{what}: an administrator can allow the command with {commands}", is_complete=True
    )


def _covers(options: str, advised: str, refused: str) -> bool:
    """Return whether options of `acls add` allow the refused operation. A broker advised other options."""
    given, wanted = shlex.split(options), shlex.split(advised)
    if wanted[-1] not in given:  # the resource
        return False
    is_implied = refused.startswith("Describe ") and not _INCLUDE_DESCRIBE.isdisjoint(given)
    return is_implied or "--consumer" in given or all(each in given for each in wanted)


def _codes_of(error: Exception) -> set[ErrorCode]:
    match error:
        case BrokerError(code=code):
            return {code}
        case PartialFailure(errors=errors):
            return set().union(*map(_codes_of, errors.values()))
        case _:
            return set()
