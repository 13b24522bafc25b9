"""Computes the settings that result from a request to change them (KIP-339), or why it is rejected. Pure."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

from minibroker.broker.settings.broker_config import BrokerConfig
from minibroker.broker.settings.layers import dynamic_problem, not_stored_problem, with_dynamic
from minibroker.broker.settings.listeners import ADVERTISED_LISTENERS, parse_advertised
from minibroker.broker.settings.parsing import (
    LISTENER_LIMITS,
    coarser_unit_problem,
    topic_config,
    topic_config_problem,
)
from minibroker.broker.settings.schema import LISTS, as_texts, known_names
from minibroker.broker.settings.topic_config import SYNONYMS, TopicConfig
from minibroker.broker.settings.types import SHORT_NUMBER, InvalidConfig
from minibroker.protocol.credential_names import of_all_listeners
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


def check_changed_once(names: Sequence[str]) -> None:
    """Reject a request that names a setting twice. Raises BrokerError."""
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise BrokerError(ErrorCode.INVALID_REQUEST, f"{twice[0]!r} is changed twice: give each setting once")


def altered(
    known: Mapping[str, str], changes: Sequence[AlterableConfig], fallback: Mapping[str, str]
) -> dict[str, str]:
    """Return the resulting settings, unchecked. Appending to an unset list extends its effective value, which
    `fallback` holds.

    The operations are idempotent, so a request may be repeated. Raises BrokerError.
    """
    check_changed_once([change.name for change in changes])
    values = dict(known)
    for change in changes:
        name, value, operation = change.name, change.value, change.config_operation
        if operation == AlterOperation.DELETE:
            values.pop(name, None)
        elif operation not in (AlterOperation.SET, AlterOperation.APPEND, AlterOperation.SUBTRACT):
            raise BrokerError(
                ErrorCode.INVALID_REQUEST,
                f"{operation} is not an operation on {name!r}: give 0 (set), 1 (delete), 2 (append) or 3 (subtract)",
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


_SEGMENT_BYTES = ("segment.bytes", "log.segment.bytes")


def small_segments_problem(values: Mapping[str, str | None], broker: BrokerConfig) -> str | None:
    """Return why a client may not set these values, or None: each segment keeps a file open. Smaller values that the
    broker was started with, or that an earlier release has stored, stay in force."""
    least = broker.internal_segment_bytes_min
    for name in _SEGMENT_BYTES:
        value = values.get(name) or ""
        if SHORT_NUMBER.fullmatch(value.strip()) and int(value) < least:
            return (
                f"{name}={value}: give {least} or more (KIP-1030), because a broker keeps each segment open; to begin "
                f"segments more often, set segment.ms"
            )
    return None


def _check_segments(known: Mapping[str, str], values: Mapping[str, str], broker: BrokerConfig) -> None:
    """Raises BrokerError."""
    problem = small_segments_problem({n: value for n, value in values.items() if known.get(n) != value}, broker)
    if problem is not None:
        raise BrokerError(ErrorCode.INVALID_CONFIG, problem)


def altered_topic(
    known: Mapping[str, str],
    changes: Sequence[AlterableConfig],
    broker: BrokerConfig,
    topic: str = "",
) -> dict[str, str]:
    """Return a topic's settings after the changes. Raises BrokerError with the value, the rule and the remedy.

    Unknown settings, left by manual edits, can be deleted.
    """
    _check_known([c for c in changes if c.name not in known or c.config_operation != AlterOperation.DELETE])
    holds = as_texts(broker)
    fallback = {name: holds[synonym] for name, synonym in SYNONYMS.items() if synonym in holds}
    values = altered(known, changes, fallback)
    if values.get(DURABILITY, REPLICATED) != known.get(DURABILITY, REPLICATED):
        raise BrokerError(
            ErrorCode.INVALID_CONFIG,
            f"{DURABILITY} is fixed when the topic is created, because records acknowledged before a change might not "
            f"be on any disk. Create another topic with it and copy the records",
        )
    problem = topic_config_problem(values, broker)
    if problem is not None:
        raise BrokerError(ErrorCode.INVALID_CONFIG, problem)
    _check_segments(known, values, broker)
    if topic in INTERNAL_TOPICS and any(change.name == CLEANUP_POLICY for change in changes):
        policy = values.get(CLEANUP_POLICY)
        if policy != INTERNAL_CLEANUP_POLICY:
            becomes = "would not be set" if policy is None else f"would be {policy}"
            raise BrokerError(
                ErrorCode.INVALID_CONFIG,
                f"{CLEANUP_POLICY} {becomes}, but {topic} holds the brokers' own state, and retention would delete the "
                f"older part of it: set {CLEANUP_POLICY}={INTERNAL_CLEANUP_POLICY}",
            )
    return values


def _check_known(changes: Sequence[AlterableConfig]) -> None:
    unknown = next((change.name for change in changes if change.name not in known_names(TopicConfig)), None)
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
    """Return the settings of a broker, or of all brokers, after the changes. `below` holds the values that apply where
    these are unset. Raises BrokerError."""
    names = {c.name: "" for c in changes if c.name not in known or c.config_operation != AlterOperation.DELETE}
    stored = [change.name for change in changes if change.config_operation != AlterOperation.DELETE]
    problem = dynamic_problem(names, is_for_all=is_for_all) or not_stored_problem(stored)
    if problem is not None:
        raise BrokerError(ErrorCode.INVALID_CONFIG, problem)
    values = altered(known, changes, as_texts(static) | dict(below))
    try:
        for change in changes:
            if change.config_operation == AlterOperation.SET and change.value is not None:
                problem = coarser_unit_problem(change.name, change.value)
                if problem is not None:
                    raise InvalidConfig(problem)
        for name in stored:  # it may be a limit of a listener that only other brokers have
            bare = of_all_listeners(name)
            if bare in LISTENER_LIMITS and name in values:
                with_dynamic(static, {bare: values[name]})
        with_dynamic(static, below, values)
        _check_segments(known, values, static)
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
    """Return the settings of another broker after changes that this one, `asked_id`, received. Raises BrokerError.

    Only `advertised.listeners` can be changed in this way: if it is wrong, no client can reach the broker itself to
    correct it. `listeners` are those that the broker has registered.
    """
    if any(change.name != ADVERTISED_LISTENERS for change in changes):
        raise not_that_broker(broker_id, asked_id)
    values = altered(known, changes, {})
    if ADVERTISED_LISTENERS in values:
        if not listeners:
            raise BrokerError(
                ErrorCode.INVALID_REQUEST,
                f"broker {broker_id} is not registered now, so its listeners are unknown: try again when it is, or "
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
        f"the request is for broker {broker_id!r}, but this is broker {asked_id}: send it to that broker (only its "
        f"{ADVERTISED_LISTENERS} can be changed here), or leave the name empty for the settings of all brokers",
    )
