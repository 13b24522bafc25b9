"""Checks of the arguments of constructors and calls. Each error names the value, the rule and the remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

from minibroker.client.errors import InvalidSetting
from minibroker.client.shown import shown
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.model import TopicPartition, topic_name_problem
from minibroker.protocol.records import ISOLATION_LEVELS

IsolationLevel = Literal["read_uncommitted", "read_committed"]

T = TypeVar("T")

MAX_MS = 2**31 - 1
MAX_TEXT = 32_767
"""The most characters of a text in a request, such as the name of a group."""


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_bootstrap(bootstrap: str | Sequence[str]) -> tuple[Address, ...]:
    """Parse `"host:port,host:port"` or a list of `"host:port"`; IPv6 in brackets. Raises InvalidSetting."""
    rule = 'give brokers as "host:port", several separated by commas or as a list'
    if isinstance(bootstrap, str):
        entries = bootstrap.split(",")
    elif isinstance(bootstrap, Sequence) and all(isinstance(entry, str) for entry in bootstrap):
        entries = [entry for text in bootstrap for entry in text.split(",")]
    else:
        raise InvalidSetting("bootstrap", bootstrap, rule)
    addresses = []
    for entry in (check_text("bootstrap", entry.strip()) for entry in entries):
        if "://" in entry:
            rule = f"leave the scheme away: {entry.partition('://')[2].rstrip('/') or 'localhost:9092'}"
            raise InvalidSetting("bootstrap", entry, rule)
        host, separator, port = entry.rpartition(":")
        if host.startswith("[") and host.endswith("]"):
            host = host[1:-1]
        elif ":" in host:
            raise InvalidSetting("bootstrap", entry, "put an IPv6 address in brackets, as in [::1]:9092")
        if not separator or not host:
            raise InvalidSetting("bootstrap", entry, rule)
        if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65_535):
            raise InvalidSetting("bootstrap", entry, "the port must be a number from 1 to 65535")
        addresses.append(Address(host, int(port)))
    if not addresses:
        raise InvalidSetting("bootstrap", bootstrap, rule)
    return tuple(dict.fromkeys(addresses))


def check_text(name: str, value: str, longest: int = MAX_TEXT) -> str:
    """Return the value, if it is text that can be sent: of at most `longest` characters, and in UTF-8. Python decodes
    bytes that are not in the locale's encoding (arguments, file names, the environment) to halves of surrogate pairs,
    which UTF-8 cannot express. Raises InvalidSetting."""
    if not isinstance(value, str):
        raise InvalidSetting(name, value, "give text: a str")
    if len(value) > longest:
        raise InvalidSetting(name, value, f"it is too long: give at most {longest:,} characters")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            rule = (
                f"{value[error.start]!r} is half of a surrogate pair, which UTF-8 cannot express. Bytes of an "
                "argument, a file name or the environment become that if they are not in the locale's encoding: give "
                "them in UTF-8, and run with a UTF-8 locale (LC_ALL=C.UTF-8)"
            )
            raise InvalidSetting(name, value, rule) from None
    return value


def check_names(name: str, values: Iterable[str]) -> list[str]:
    """Return the names of topics, each once. Raises InvalidSetting, also for a single name, which would be a list of
    letters."""
    if isinstance(values, str):
        raise InvalidSetting(name, values, f"give a list: [{shown(values)}]")
    if not isinstance(values, Iterable):
        raise InvalidSetting(name, values, 'give a list: ["name"]')
    checked = list(values)
    for value in checked:
        problem = topic_name_problem(value) if isinstance(value, str) else "a name is a str"
        if problem is not None:
            raise InvalidSetting(name, value, problem)
    return list(dict.fromkeys(checked))


def check_topic_name(topic: object) -> None:
    """Raise BrokerError (INVALID_TOPIC_EXCEPTION), with the rule, if the name is illegal."""
    problem = topic_name_problem(topic) if isinstance(topic, str) else f"{shown(topic)}: a name is a str"
    if problem is not None:
        raise BrokerError(ErrorCode.INVALID_TOPIC_EXCEPTION, problem, is_complete=True)


def check_partitions(name: str, values: Iterable[TopicPartition] | TopicPartition) -> list[TopicPartition]:
    """Return the partitions, each once. Pairs of a topic and a number are accepted. Raises InvalidSetting."""
    if isinstance(values, (TopicPartition, str)) or not isinstance(values, Iterable):
        raise InvalidSetting(name, values, 'give a list: [TopicPartition("topic", 0)]')
    return list(dict.fromkeys(check_partition(name, value) for value in values))


def check_partition(name: str, value: object) -> TopicPartition:
    """Return the partition. A pair of a topic and a number is accepted. Raises InvalidSetting."""
    if isinstance(value, list) and value:
        raise InvalidSetting(
            name, value, 'give TopicPartition("topic", 0), not a list: put * before it where several may be given'
        )
    if not isinstance(value, tuple) or len(value) != 2 or type(value[1]) is not int or value[1] < 0:
        raise InvalidSetting(name, value, 'give TopicPartition("topic", 0)')
    check_names(name, [value[0]])
    return TopicPartition(*value)


def check_by_partition(
    name: str, values: Mapping[TopicPartition, T], example: object, check: Callable[[T], object] = lambda _: None
) -> dict[TopicPartition, T]:
    """Return the value for each partition. `example` is a legal value, for the error. `check` raises InvalidSetting for
    an illegal one. Raises InvalidSetting."""
    if not isinstance(values, Mapping):
        raise InvalidSetting(name, values, f'give a dict: {{TopicPartition("topic", 0): {example}}}')
    checked = dict(zip(check_partitions(name, values), values.values(), strict=True))
    for partition, value in checked.items():
        try:
            check(value)
        except InvalidSetting as error:
            raise about(partition, error) from None
    return checked


def about(element: object, error: InvalidSetting) -> InvalidSetting:
    """Return the error with the name of the one of several elements that it is about."""
    return InvalidSetting(error.name, error.value, f"{error.rule}, for {element}")


def check_integer(name: str, value: int, lowest: int, highest: int) -> int:
    """Return the value, if it is an int within both bounds. Raises InvalidSetting."""
    if type(value) is not int or not lowest <= value <= highest:
        raise InvalidSetting(name, value, f"give a whole number from {lowest} to {highest}")
    return value


def check_boolean(name: str, value: bool) -> bool:
    """Return the value, if it is True or False; the text "false" would be true. Raises InvalidSetting."""
    if type(value) is not bool:
        raise InvalidSetting(name, value, "give True or False")
    return value


def check_ms(name: str, value: float, lowest: int = 0) -> float:
    """Return the milliseconds as seconds. Fractions are allowed. Raises InvalidSetting."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not lowest <= value <= MAX_MS:
        raise InvalidSetting(name, value, f"give milliseconds, a number from {lowest} to {MAX_MS}")
    return value / 1_000


def check_whole_ms(name: str, value: float, lowest: int = 0) -> float:
    """As `check_ms`, for a time that a request carries to brokers, which know no fractions of milliseconds."""
    if isinstance(value, float) and not value.is_integer():
        raise InvalidSetting(name, value, f"give whole milliseconds, a number from {lowest} to {MAX_MS}")
    return check_ms(name, value, lowest)


def check_isolation_level(isolation_level: IsolationLevel) -> int:
    """Return READ_UNCOMMITTED or READ_COMMITTED. Raises InvalidSetting."""
    return ISOLATION_LEVELS[check_choice("isolation_level", isolation_level, list(ISOLATION_LEVELS))]


def check_choice(name: str, value: str, choices: Sequence[str]) -> str:
    """Return the value, if it is one of the choices. Raises InvalidSetting naming them."""
    if value not in choices:
        raise InvalidSetting(name, value, f"use one of {', '.join(repr(choice) for choice in choices)}")
    return value
