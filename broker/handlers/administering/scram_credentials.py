"""DescribeUserScramCredentials and AlterUserScramCredentials (KIP-554). Any broker serves them, from ZooKeeper."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping

from minibroker.broker.handlers.services import Services, answer_later
from minibroker.broker.network.request_channel import Request
from minibroker.broker.quotas import stored
from minibroker.broker.quotas.entities import QuotaEntity, entity_problem
from minibroker.broker.security.scram_credentials import Credentials, as_text, read_all
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    AlteredScramUser,
    AlterUserScramCredentialsRequest,
    AlterUserScramCredentialsResponse,
    DescribedScramUser,
    DescribeUserScramCredentialsRequest,
    DescribeUserScramCredentialsResponse,
    ScramCredentialDeletion,
    ScramCredentialInfo,
    ScramCredentialUpsertion,
)
from minibroker.protocol.sasl.scram import (
    LEAST_ITERATIONS,
    LONGEST_NAME,
    MOST_ITERATIONS,
    ScramMechanism,
    credential_of,
    name_problem,
)
from minibroker.protocol.world import BadVersion, ConnectionLoss, MultiFailed, NodeExists, NoNode, SessionExpired
from minibroker.protocol.znodes import MalformedZnode
from minibroker.protocol.zookeeper_reads import catch_up

TIMEOUT_MS = 20_000
RETRY_S = 0.05


async def handle_describe_user_scram_credentials(
    services: Services, request: Request, body: DescribeUserScramCredentialsRequest
) -> None:
    async def answer() -> None:
        found = await _read_all(services)
        counts = Counter(user.name for user in body.users or ())
        results = [_described(user, counts[user], found) for user in counts or sorted(found)]
        request.respond(DescribeUserScramCredentialsResponse(0, ErrorCode.NONE, "", results))

    answer_later(services, request, TIMEOUT_MS, answer)


def _described(user: str, named: int, found: Credentials) -> DescribedScramUser:
    if named > 1:
        text = f"the user {user[:LONGEST_NAME]!r} is named {named} times in the request"
        return DescribedScramUser(user, ErrorCode.DUPLICATE_RESOURCE, text)
    if user not in found:
        return DescribedScramUser(user, ErrorCode.RESOURCE_NOT_FOUND, f"{user[:LONGEST_NAME]!r} has no credentials")
    infos = [ScramCredentialInfo(mechanism, each.iterations) for mechanism, each in sorted(found[user].items())]
    return DescribedScramUser(user, ErrorCode.NONE, "", infos)


async def _read_all(services: Services) -> Credentials:
    while True:
        try:
            async with services.configs.turns:
                session = await services.sessions()
                await catch_up(session)
                return await read_all(session)
        except (ConnectionLoss, SessionExpired):
            await asyncio.sleep(RETRY_S)


async def handle_alter_user_scram_credentials(
    services: Services, request: Request, body: AlterUserScramCredentialsRequest
) -> None:
    """Answer when the credentials are in ZooKeeper; the brokers accept them soon after. A user is changed as a whole or
    not at all."""
    changes: dict[str, list[ScramCredentialDeletion | ScramCredentialUpsertion]] = {}
    for deletion in body.deletions:
        changes.setdefault(deletion.name, []).append(deletion)
    for upsertion in body.upsertions:
        changes.setdefault(upsertion.name, []).append(upsertion)

    async def answer() -> None:
        results = []
        for user, of_user in changes.items():
            result = AlteredScramUser(user, ErrorCode.NONE)
            try:
                await _alter(services, user, _texts(user, of_user))
            except BrokerError as error:
                result.error_code, result.error_message = error.code, error.detail
            results.append(result)
        request.respond(AlterUserScramCredentialsResponse(0, results))

    answer_later(services, request, TIMEOUT_MS, answer)


def _texts(user: str, changes: list[ScramCredentialDeletion | ScramCredentialUpsertion]) -> dict[str, str | None]:
    """Return the settings to change; None: to remove. Raises BrokerError."""
    problem = None
    if not user or len(user) > LONGEST_NAME or any(isinstance(each, ScramCredentialUpsertion) for each in changes):
        problem = name_problem(user)  # a user of an earlier release, with such a name, can be deleted
    problem = problem or entity_problem(QuotaEntity(user))
    if problem is not None:
        raise BrokerError(ErrorCode.UNACCEPTABLE_CREDENTIAL, problem)
    texts: dict[str, str | None] = {}
    for change in changes:
        try:
            mechanism = ScramMechanism(change.mechanism)
        except ValueError:
            text = f"mechanism {change.mechanism} is neither 1 (SCRAM-SHA-256) nor 2 (SCRAM-SHA-512)"
            raise BrokerError(ErrorCode.UNSUPPORTED_SASL_MECHANISM, text) from None
        if mechanism.mechanism in texts:
            text = f"{mechanism.mechanism} is named twice for the same user"
            raise BrokerError(ErrorCode.DUPLICATE_RESOURCE, text)
        texts[mechanism.mechanism] = None
        if isinstance(change, ScramCredentialUpsertion):
            _check(change)
            made = credential_of(mechanism, change.salted_password, change.salt, change.iterations)
            texts[mechanism.mechanism] = as_text(made)
    return texts


def _check(change: ScramCredentialUpsertion) -> None:
    """Raises BrokerError."""
    problem = None
    if not LEAST_ITERATIONS <= change.iterations <= MOST_ITERATIONS:
        problem = f"{change.iterations} iterations: give from {LEAST_ITERATIONS} to {MOST_ITERATIONS}"
    elif not change.salt:  # Kafka accepts a short one, and kafka-go's tests send seven bytes
        problem = "the salt is empty"
    elif not change.salted_password:
        problem = "the salted password is empty"
    if problem is not None:
        raise BrokerError(ErrorCode.UNACCEPTABLE_CREDENTIAL, problem)


async def _alter(services: Services, user: str, changes: Mapping[str, str | None]) -> None:
    """Raises BrokerError."""
    entity = QuotaEntity(user)
    was_tried = False
    while True:
        try:
            async with services.configs.turns:
                session = await services.sessions()
                await catch_up(session)
                found = await stored.find(session, entity)
                missing = [name for name, text in changes.items() if text is None and name not in found.texts]
                if missing and not was_tried:
                    raise BrokerError(
                        ErrorCode.RESOURCE_NOT_FOUND, f"{user!r} has no credential of {missing[0]} to delete"
                    )
                kept = {name: text for name, text in found.texts.items() if name not in changes}
                kept |= {name: text for name, text in changes.items() if text is not None}
                was_tried = True
                await stored.write(session, entity, found, kept)
                return
        except MalformedZnode:
            text = f"the settings of {user!r} in ZooKeeper are malformed: correct or delete them there"
            raise BrokerError(ErrorCode.INVALID_CONFIG, text) from None
        except (ConnectionLoss, SessionExpired):
            await asyncio.sleep(RETRY_S)
        except MultiFailed as refused:
            # Another request has changed the same settings: start again.
            if not isinstance(refused.cause, BadVersion | NodeExists | NoNode):
                raise
            was_tried = False
            await asyncio.sleep(RETRY_S)
