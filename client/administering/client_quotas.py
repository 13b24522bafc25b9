"""Quotas of users and clients: DescribeClientQuotas and AlterClientQuotas at any broker (KIP-546)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from minibroker.client.administering.requests import AdminRequests
from minibroker.client.errors import InvalidSetting, PartialFailure
from minibroker.client.settings import check_text
from minibroker.client.shown import shown
from minibroker.protocol import messages as m
from minibroker.protocol.apis import ALTER_CLIENT_QUOTAS, DESCRIBE_CLIENT_QUOTAS
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, error_of

DEFAULT_ENTITY = "<default>"
"""In place of a user or client id: all that have no quota of their own."""

_EXACT, _DEFAULT = 0, 1


class QuotaEntity(NamedTuple):
    """A user, a client id, a client id of a user, or an IP address. DEFAULT_ENTITY stands for those without a quota of
    their own."""

    user: str | None = None
    client_id: str | None = None
    ip: str | None = None
    """Alone: its quota is "connection_creation_rate"."""

    def __str__(self) -> str:
        parts = (("user", self.user), ("client id", self.client_id), ("address", self.ip))
        named = ((noun, name) for noun, name in parts if name is not None)
        return ", ".join(
            f"all other {noun}{'es' if noun == 'address' else 's'}" if name == DEFAULT_ENTITY else f"{noun} {name}"
            for noun, name in named
        )


class QuotaErrors(PartialFailure[QuotaEntity, None]):
    """The quotas of some entities were not changed; `errors` is by entity."""


async def describe(
    requests: AdminRequests, user: str | None, client_id: str | None, ip: str | None
) -> dict[QuotaEntity, dict[str, float]]:
    """See `Admin.describe_client_quotas`."""
    parts = _parts(QuotaEntity(user, client_id, ip))
    components = [
        m.QuotaFilterComponent(part.entity_type, _DEFAULT if part.entity_name is None else _EXACT, part.entity_name)
        for part in parts
    ]
    response = await requests.ask(None, DESCRIBE_CLIENT_QUOTAS, m.DescribeClientQuotasRequest(components, False))
    code = error_of(response.error_code)
    if code is not ErrorCode.NONE:
        raise BrokerError(code, response.error_message or DESCRIBE_CLIENT_QUOTAS.name)
    return {_entity(each.entity): {one.key: one.value for one in each.values} for each in response.entries or ()}


async def alter(
    requests: AdminRequests, changes: Mapping[QuotaEntity, Mapping[str, float | None]], *, validate_only: bool
) -> None:
    """See `Admin.alter_client_quotas`."""
    entries = []
    for entity, quotas in changes.items():
        if not isinstance(entity, QuotaEntity) or entity == QuotaEntity():
            raise InvalidSetting(
                "changes",
                entity,
                "give QuotaEntity(user=...), QuotaEntity(client_id=...) or both, or QuotaEntity(ip=...)",
            )
        ops = []
        for name, value in quotas.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise InvalidSetting(name, value, "a quota is a number, or None to remove it")
            ops.append(m.QuotaChange(name, float(value or 0), value is None))
        entries.append(m.AlteredQuotas(_parts(entity), ops))
    if not entries:
        return
    response = await requests.ask(None, ALTER_CLIENT_QUOTAS, m.AlterClientQuotasRequest(entries, validate_only))
    errors = {
        _entity(each.entity): BrokerError(error_of(each.error_code), each.error_message or ALTER_CLIENT_QUOTAS.name)
        for each in response.entries
        if each.error_code != ErrorCode.NONE
    }
    if errors:
        raise QuotaErrors(errors)


def _parts(entity: QuotaEntity) -> list[m.QuotaEntityPart]:
    parts = []
    for kind, name in (("user", entity.user), ("client-id", entity.client_id), ("ip", entity.ip)):
        if name is not None:
            if not check_text(kind, name):
                raise InvalidSetting(kind, name, "it is not empty; DEFAULT_ENTITY stands for all others")
            parts.append(m.QuotaEntityPart(kind, None if name == DEFAULT_ENTITY else name))
    return parts


def _entity(parts: list[m.QuotaEntityPart]) -> QuotaEntity:
    names = {part.entity_type: DEFAULT_ENTITY if part.entity_name is None else part.entity_name for part in parts}
    if not names.keys() <= {"user", "client-id", "ip"}:
        raise InvalidMessage(f"an entity of unknown types: {shown(sorted(names))}")
    return QuotaEntity(names.get("user"), names.get("client-id"), names.get("ip"))
