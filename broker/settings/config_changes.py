"""What a request to change settings makes of them (KIP-339), and why it may not. Pure."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import msgspec

from minibroker.broker.settings.config import (
    ADVERTISED_LISTENERS,
    LISTS,
    SYNONYMS,
    BrokerConfig,
    InvalidConfig,
    TopicConfig,
    as_texts,
    coarser_unit_problem,
    dynamic_problem,
    parse_advertised,
    topic_config,
    topic_config_problem,
    with_dynamic,
)
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import AlterableConfig
from minibroker.protocol.model import (
    CLEANUP_POLICY,
    DURABILITY,
    INTERNAL_CLEANUP_POLICY,
    INTERNAL_TOPICS,
    REPLICATED,
    AlterOperation,
)

_TOPIC_SETTINGS = frozenset(field.encode_name for field in msgspec.structs.fields(TopicConfig))


def check_changed_once(names: Sequence[str]) -> None:
    """Raises BrokerError."""
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"{twice[0]!r} is to be changed twice: give each setting once")


def altered(
    known: Mapping[str, str], changes: Sequence[AlterableConfig], fallback: Mapping[str, str]
) -> dict[str, str]:
    """The settings that follow, not yet checked. A list that is not set is changed as it holds: `fallback` has that.

    To carry the same changes out again changes nothing, so they may be repeated. Raises BrokerError."""
    check_changed_once([change.name for change in changes])
    values = dict(known)
    for change in changes:
        name, value, operation = change.name, change.value, change.config_operation
        if operation == AlterOperation.DELETE:
            values.pop(name, None)
        elif operation not in (AlterOperation.SET, AlterOperation.APPEND, AlterOperation.SUBTRACT):
            raise BrokerError(
                ErrorCode.INVALID_REQUEST,
                f"{operation} is no operation on {name!r}: give 0 (set), 1 (delete), 2 (append) or 3 (subtract)",
            )
        elif value is None:
            raise BrokerError(ErrorCode.INVALID_REQUEST, f"{name!r} has no value: give one, or delete the setting")
        elif operation == AlterOperation.SET:
            values[name] = value
        elif name not in LISTS:
            raise BrokerError(
                ErrorCode.INVALID_CONFIG, f"{name!r} is not a list to append to or to subtract from: set it"
            )
        else:
            items, given = _items(values.get(name, fallback.get(name, ""))), _items(value)
            if operation == AlterOperation.APPEND:
                items += [item for item in given if item not in items]
            else:
                items = [item for item in items if item not in given]
            values[name] = ",".join(items)
    return values


def _items(text: str) -> list[str]:
    return [item.strip() for item in text.split(",") if item.strip()]


def altered_topic(
    known: Mapping[str, str],
    changes: Sequence[AlterableConfig],
    broker: BrokerConfig,
    topic: str = "",
) -> dict[str, str]:
    """A topic's settings after the changes. Raises BrokerError with the value, the rule and the remedy. `topic`: its
    name.

    Whatever is there and no topic has may be deleted: it was edited by hand, and that mends it."""
    _check_known([c for c in changes if c.name not in known or c.config_operation != AlterOperation.DELETE])
    holds = as_texts(broker)
    fallback = {name: holds[synonym] for name, synonym in SYNONYMS.items() if synonym in holds}
    values = altered(known, changes, fallback)
    if values.get(DURABILITY, REPLICATED) != known.get(DURABILITY, REPLICATED):
        raise BrokerError(
            ErrorCode.INVALID_CONFIG,
            f"{DURABILITY} stays as it was when the topic was created: what is acknowledged by now need not be on any "
            f"disk. Create another topic with it, and copy what this one has",
        )
    problem = topic_config_problem(values, broker)
    if problem is not None:
        raise BrokerError(ErrorCode.INVALID_CONFIG, problem)
    if topic in INTERNAL_TOPICS and any(change.name == CLEANUP_POLICY for change in changes):
        policy = values.get(CLEANUP_POLICY)
        if policy != INTERNAL_CLEANUP_POLICY:
            becomes = "would not be set" if policy is None else f"would be {policy}"
            raise BrokerError(
                ErrorCode.INVALID_CONFIG,
                f"{CLEANUP_POLICY} {becomes}, but the brokers keep their own state there, and what is older than a "
                f"retention would be lost: give {CLEANUP_POLICY}={INTERNAL_CLEANUP_POLICY} to {topic}",
            )
    return values


def _check_known(changes: Sequence[AlterableConfig]) -> None:
    unknown = next((change.name for change in changes if change.name not in _TOPIC_SETTINGS), None)
    if unknown is not None:
        try:
            topic_config({unknown: ""})
        except InvalidConfig as error:
            raise BrokerError(ErrorCode.INVALID_CONFIG, str(error)) from error


def altered_broker(
    known: Mapping[str, str],
    changes: Sequence[AlterableConfig],
    static: BrokerConfig,
    below: Mapping[str, str],
    *,
    is_for_all: bool = False,
) -> dict[str, str]:
    """What is set for a broker, or for all of them, after the changes. `below`: what holds where it is not set here.
    Raises BrokerError."""
    names = {c.name: "" for c in changes if c.name not in known or c.config_operation != AlterOperation.DELETE}
    problem = dynamic_problem(names, is_for_all=is_for_all)
    if problem is not None:
        raise BrokerError(ErrorCode.INVALID_CONFIG, problem)
    values = altered(known, changes, as_texts(static) | dict(below))
    try:
        for change in changes:
            if change.config_operation == AlterOperation.SET and change.value is not None:
                problem = coarser_unit_problem(change.name, change.value)
                if problem is not None:
                    raise InvalidConfig(problem)
        with_dynamic(static, below, values)
    except InvalidConfig as error:
        raise BrokerError(ErrorCode.INVALID_CONFIG, str(error)) from error
    return values


def altered_other_broker(
    known: Mapping[str, str],
    changes: Sequence[AlterableConfig],
    broker_id: str,
    asked_id: int,
    listeners: Collection[str],
) -> dict[str, str]:
    """What is set for a broker, after changes that another one (`asked_id`) was asked for. Raises BrokerError.

    Only where it is found: if that is wrong, no client reaches the broker itself, to correct it. `listeners`: those
    with which it is registered."""
    if any(change.name != ADVERTISED_LISTENERS for change in changes):
        raise not_that_broker(broker_id, asked_id)
    values = altered(known, changes, {})
    if ADVERTISED_LISTENERS in values:
        if not listeners:
            raise BrokerError(
                ErrorCode.INVALID_REQUEST,
                f"broker {broker_id} is not registered now, so its listeners are not known: ask again when it is, or "
                f"delete {ADVERTISED_LISTENERS}",
            )
        try:
            parse_advertised(values[ADVERTISED_LISTENERS], listeners)
        except InvalidConfig as error:
            raise BrokerError(ErrorCode.INVALID_CONFIG, str(error)) from error
    return values


def not_that_broker(broker_id: str, asked_id: int) -> BrokerError:
    return BrokerError(
        ErrorCode.INVALID_REQUEST,
        f"broker {broker_id!r} was meant, and this is broker {asked_id}: ask that broker itself (only its "
        f"{ADVERTISED_LISTENERS} can be changed here), or leave the name empty for what holds for all brokers",
    )
