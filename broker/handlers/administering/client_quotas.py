"""DescribeClientQuotas and AlterClientQuotas (KIP-546). Any broker serves them, from ZooKeeper."""

import asyncio
from collections.abc import Sequence

from minibroker.broker.handlers.services import Services, answer_later
from minibroker.broker.network.request_channel import Request
from minibroker.broker.quotas import stored
from minibroker.broker.quotas.entities import (
    DEFAULT,
    OF_ADDRESSES,
    Part,
    QuotaEntity,
    QuotaKey,
    address_of,
    entities_of,
    entity_problem,
    key_of,
    path_of,
    problem_of,
    unknown_key,
)
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import (
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    AlteredQuotas,
    AlteredQuotasResponse,
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
    DescribedQuotas,
    QuotaEntityPart,
    QuotaFilterComponent,
    QuotaValue,
)
from minibroker.protocol.world import (
    BadVersion,
    ConnectionLoss,
    MultiFailed,
    NodeExists,
    NoNode,
    SessionExpired,
    ZooKeeperSession,
)
from minibroker.protocol.znodes import MalformedZnode
from minibroker.protocol.zookeeper_reads import catch_up

TIMEOUT_MS = 20_000
RETRY_S = 0.05

USER = "user"
CLIENT_ID = "client-id"
IP = "ip"
EXACT, OF_DEFAULT, ANY = 0, 1, 2
"""The match types of a filter."""


async def handle_describe_client_quotas(
    services: Services, request: Request, body: DescribeClientQuotasRequest
) -> None:
    wanted = {component.entity_type: component for component in body.components}
    _check_types([component.entity_type for component in body.components])
    for component in body.components:
        if component.match_type not in (EXACT, OF_DEFAULT, ANY) or (component.match_type == EXACT) is (
            component.match is None
        ):
            raise BrokerError(
                ErrorCode.INVALID_REQUEST,
                f"the filter of {component.entity_type} has match type {component.match_type} and "
                f"{'no' if component.match is None else 'a'} name: give 0 with a name, 1 (the default) or 2 (any)",
            )

    async def answer() -> None:
        found = await _read_all(services)
        entries = [
            DescribedQuotas(_parts(entity), [QuotaValue(key.value, value) for key, value in quotas.items()])
            for entity, quotas in sorted(found.items(), key=lambda item: path_of(item[0]))
            if quotas
            and _matches(wanted.get(USER), entity.user, strict=body.strict)
            and _matches(wanted.get(CLIENT_ID), entity.client_id, strict=body.strict)
            and _matches(wanted.get(IP), entity.ip, strict=body.strict)
        ]
        request.respond(DescribeClientQuotasResponse(0, ErrorCode.NONE, None, entries))

    answer_later(services, request, TIMEOUT_MS, answer)


async def _read_all(services: Services) -> stored.AllQuotas:
    while True:
        try:
            async with services.configs.turns:
                session = await services.sessions()
                await catch_up(session)
                return await stored.read_all(session)
        except (ConnectionLoss, SessionExpired):
            await asyncio.sleep(RETRY_S)


async def handle_alter_client_quotas(services: Services, request: Request, body: AlterClientQuotasRequest) -> None:
    """Answer when the new quotas are in ZooKeeper; the brokers apply them soon after."""

    async def answer() -> None:
        results = []
        for entry in body.entries:
            result = AlteredQuotasResponse(ErrorCode.NONE, None, entry.entity)
            try:
                if [each.entity for each in body.entries].count(entry.entity) > 1:
                    raise BrokerError(ErrorCode.INVALID_REQUEST, "it is in the request twice: give all changes at once")
                await _alter(services, entry, validate_only=body.validate_only)
            except BrokerError as error:
                result.error_code, result.error_message = error.code, error.detail
            results.append(result)
        request.respond(AlterClientQuotasResponse(0, results))

    answer_later(services, request, TIMEOUT_MS, answer)


async def _alter(services: Services, entry: AlteredQuotas, *, validate_only: bool) -> None:
    """Raises BrokerError, and then nothing was changed, unless an earlier write whose answer was lost has made this
    very change."""
    entity, changes = _entity(entry.entity), _changes(entry)
    while True:
        try:
            async with services.configs.turns:
                session = await services.sessions()
                await catch_up(session)
                found = await _found(session, entity)
                if not validate_only:
                    await stored.write(session, entity, found, stored.with_changes(found.texts, changes))
                return
        except (ConnectionLoss, SessionExpired):
            await asyncio.sleep(RETRY_S)
        except MultiFailed as refused:
            # Another request has changed the same settings: start again.
            if not isinstance(refused.cause, BadVersion | NodeExists | NoNode):
                raise
            await asyncio.sleep(RETRY_S)


async def _found(session: ZooKeeperSession, entity: QuotaEntity) -> stored.StoredQuotas:
    try:
        return await stored.find(session, entity)
    except MalformedZnode as error:
        raise BrokerError(ErrorCode.INVALID_CONFIG, str(error)) from error


# --- entities and changes on the wire ------------------------------------------------------------------------------


def _check_types(types: Sequence[str]) -> None:
    for name in types:
        if name not in (USER, CLIENT_ID, IP):
            raise BrokerError(
                ErrorCode.INVALID_REQUEST,
                f"entities of the type {name!r} have no quotas here: give {USER}, {CLIENT_ID} or both, or {IP}",
            )
        if name == IP and len(types) > 1:
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"{IP} is given with another type: give it alone")
        if types.count(name) > 1:
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"{name} is given twice")


def _entity(parts: Sequence[QuotaEntityPart]) -> QuotaEntity:
    _check_types([part.entity_type for part in parts])
    if not parts:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"no entity: give {USER}, {CLIENT_ID} or both")
    names: dict[str, Part] = {}
    for part in parts:
        if part.entity_name == "":
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"the name of {part.entity_type} is empty")
        names[part.entity_type] = DEFAULT if part.entity_name is None else part.entity_name
    address = names.get(IP)
    if isinstance(address, str):
        names[IP] = address_of(address)
        if names[IP] is None:
            raise BrokerError(
                ErrorCode.INVALID_REQUEST, f"{address!r} is not an IP address: give one, such as 10.0.0.1"
            )
    entity = QuotaEntity(names.get(USER), names.get(CLIENT_ID), names.get(IP))
    problem = entity_problem(entity)
    if problem is not None:
        raise BrokerError(ErrorCode.INVALID_REQUEST, problem)
    return entity


def _changes(entry: AlteredQuotas) -> dict[QuotaKey, float | None]:
    changes: dict[QuotaKey, float | None] = {}
    is_of_address = any(part.entity_type == IP for part in entry.entity)
    for change in entry.ops:
        key = key_of(change.key)
        if key is None:
            raise BrokerError(ErrorCode.INVALID_REQUEST, unknown_key(change.key, is_of_address))
        if key in changes:
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"{change.key} is changed twice")
        problem = None if change.remove else problem_of(key, change.value)
        if problem is not None:
            raise BrokerError(ErrorCode.INVALID_REQUEST, problem)
        if (key in OF_ADDRESSES) is not is_of_address:
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"{change.key} is a quota of {entities_of(key)}")
        changes[key] = None if change.remove else change.value
    return changes


def _parts(entity: QuotaEntity) -> list[QuotaEntityPart]:
    named = ((USER, entity.user), (CLIENT_ID, entity.client_id), (IP, entity.ip))
    return [QuotaEntityPart(kind, part if isinstance(part, str) else None) for kind, part in named if part is not None]


def _matches(component: QuotaFilterComponent | None, part: Part, *, strict: bool) -> bool:
    if component is None:
        return part is None or not strict
    if component.match_type == EXACT:
        return part == component.match
    return part is not None if component.match_type == ANY else part is DEFAULT
