"""The options of the source and the sink: text in, frozen values out. Pure.

Names and meanings are those of Spark's own Kafka connector (spark-sql-kafka-0-10); Spark passes names in any case.
Unknown options and values are rejected with name, value and rule, so that a misspelt option is not silently ignored.

An offset can be given in several ways. For each partition the first of these applies: the timestamp for all, the
timestamp for this partition, the offset for this partition, the offset for the rest. (In Kafka's connector the JSON
must name every partition.)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from minibroker.client.errors import InvalidSetting
from minibroker.client.security import KAFKA_NAMES, Security, from_kafka_names
from minibroker.client.settings import parse_bootstrap
from minibroker.protocol.messages import EARLIEST_TIMESTAMP, LATEST_TIMESTAMP
from minibroker.protocol.model import TopicPartition, topic_name_problem
from minibroker.protocol.records import ISOLATION_LEVELS, READ_UNCOMMITTED

EARLIEST = EARLIEST_TIMESTAMP
LATEST = LATEST_TIMESTAMP
REST = "*"
"""The key in the JSON of offsets for the partitions that it does not name."""

DEFAULT_MAX_OFFSETS_PER_TRIGGER = 10_000_000
"""The default for streams: without a limit the first batch of a query from "earliest" would be the whole topic."""
DEFAULT_MAX_TRIGGER_DELAY_MS = 15 * 60 * 1_000
DEFAULT_CLIENT_ID_PREFIX = "minibroker-spark"
DEFAULT_TRANSACTION_TIMEOUT_MS = 15 * 60 * 1_000
"""The brokers' default limit (`transaction.max.timeout.ms`)."""
_MAX_TIMEOUT_MS = 2**31 - 1

_MAX_OFFSET = 1 << 62
_DURATION = re.compile(r"(\d+)\s*(ms|s|m|min|h|d)?")
_DURATION_MS = {"ms": 1, "s": 1_000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}

_BOOTSTRAP = ("bootstrap.servers", "kafka.bootstrap.servers")
_SECURITY = (*KAFKA_NAMES, *(f"kafka.{name}" for name in KAFKA_NAMES))
_ISOLATION = ("isolation.level", "kafka.isolation.level")
_SUBSCRIPTIONS = ("subscribe", "subscribePattern", "assign")
_STARTING = ("startingTimestamp", "startingOffsetsByTimestamp", "startingOffsets", "startingOffsetsByTimestampStrategy")
_ENDING = ("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets")
_STREAM_ONLY = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay", "initialOffsetsFile")
READ_OPTIONS = (
    *_BOOTSTRAP,
    *_SECURITY,
    *_SUBSCRIPTIONS,
    *_STARTING,
    *_ENDING,
    *_STREAM_ONLY,
    "minPartitions",
    "maxRecordsPerPartition",
    *_ISOLATION,
    "failOnDataLoss",
    "timestampOutOfRange",
    "includeHeaders",
    "groupIdPrefix",
)
_EXACTLY_ONCE = ("transactionTimeout", "writeId")
WRITE_OPTIONS = (*_BOOTSTRAP, *_SECURITY, "topic", "exactlyOnce", *_EXACTLY_ONCE)
_SPARKS_OWN = ("checkpointLocation", "queryName")
"""Options of Spark itself, which it also passes to sinks."""


@dataclass(frozen=True)
class Subscription:
    """The partitions to read: exactly one of the fields is set."""

    topics: tuple[str, ...] = ()
    pattern: str | None = None
    """A Python regular expression that a whole name must match."""
    partitions: tuple[TopicPartition, ...] = ()

    def wants_topic(self, topic: str) -> bool:
        if self.pattern is not None:
            return re.fullmatch(self.pattern, topic) is not None
        return topic in self.topics or any(partition.topic == topic for partition in self.partitions)

    def wants(self, partition: TopicPartition) -> bool:
        return partition in self.partitions if self.partitions else self.wants_topic(partition.topic)


@dataclass(frozen=True)
class Bound:
    """The start or the end of a query."""

    rest: int
    """EARLIEST or LATEST, for the partitions that no other field names."""
    offsets: Mapping[TopicPartition, int] = field(default_factory=dict)
    """EARLIEST, LATEST, or an offset."""
    timestamps_ms: Mapping[TopicPartition, int] = field(default_factory=dict)
    timestamp_ms: int | None = None
    topic_ids: Mapping[str, str] = field(default_factory=dict)
    """The ids of the topics of `offsets`, if the JSON has them."""
    unmatched_is_latest: bool = False
    """Whether to use the end of the log, and not to fail, if no record is as recent as a timestamp."""

    def timestamp_of(self, partition: TopicPartition) -> int | None:
        return self.timestamps_ms.get(partition) if self.timestamp_ms is None else self.timestamp_ms

    def offset_of(self, partition: TopicPartition) -> int:
        return self.offsets.get(partition, self.rest)

    def named(self) -> list[TopicPartition]:
        return sorted({*self.offsets, *self.timestamps_ms})


@dataclass(frozen=True)
class ReadOptions:
    bootstrap: str
    subscription: Subscription
    starting: Bound
    ending: Bound
    """For batch queries; a stream never ends."""
    max_offsets_per_trigger: int = DEFAULT_MAX_OFFSETS_PER_TRIGGER
    min_offsets_per_trigger: int = 0
    max_trigger_delay_ms: int = DEFAULT_MAX_TRIGGER_DELAY_MS
    min_partitions: int = 0
    max_records_per_partition: int | None = None
    isolation_level: int = READ_UNCOMMITTED
    fail_on_data_loss: bool = True
    fail_on_timestamp: bool = True
    """Whether a timestamp beyond Spark's range is an error, or null."""
    include_headers: bool = False
    client_id: str = DEFAULT_CLIENT_ID_PREFIX
    initial_offsets_file: str | None = None
    security: Security = field(default_factory=Security, repr=False)


@dataclass(frozen=True)
class WriteOptions:
    bootstrap: str
    topic: str | None
    """The topic of every row; None: the column `topic` has it."""
    is_exactly_once: bool = False
    transaction_timeout_ms: int = DEFAULT_TRANSACTION_TIMEOUT_MS
    """The coordinator aborts the transaction of a task that is open for longer."""
    write_id: str | None = None
    """The name of a batch write, so that a repetition of it writes nothing."""
    security: Security = field(default_factory=Security, repr=False)


def parse_include_headers(options: Mapping[str, str]) -> bool:
    """Parse `includeHeaders` alone, the only option on which the schema depends. Raises InvalidSetting."""
    return _boolean({name.lower(): value for name, value in options.items()}, "includeHeaders", default=False)


def parse_read_options(options: Mapping[str, str], *, is_streaming: bool) -> ReadOptions:
    """Raises InvalidSetting."""
    given = _given(options, READ_OPTIONS)
    misplaced = _ENDING if is_streaming else _STREAM_ONLY
    for name in misplaced:
        if name.lower() in given:
            kind = "a stream has no end: drop it, or use spark.read" if is_streaming else "it is for spark.readStream"
            raise InvalidSetting(name, given[name.lower()], kind)
    default_start = LATEST if is_streaming else EARLIEST
    starting = _bound(given, "starting", default_start, (EARLIEST, LATEST) if is_streaming else (EARLIEST,))
    ending = Bound(LATEST) if is_streaming else _bound(given, "ending", LATEST, (LATEST,))
    most = _integer(given, "maxOffsetsPerTrigger", 1, DEFAULT_MAX_OFFSETS_PER_TRIGGER)
    least = _integer(given, "minOffsetsPerTrigger", 1, 0)
    if "maxoffsetspertrigger" in given and least > most:
        raise InvalidSetting("minOffsetsPerTrigger", least, f"it must not be above maxOffsetsPerTrigger={most}")
    most_records = _integer(given, "maxRecordsPerPartition", 1, 0)
    prefix = given.get("groupidprefix", DEFAULT_CLIENT_ID_PREFIX)
    if not 1 <= len(prefix) <= 200:
        raise InvalidSetting("groupIdPrefix", prefix, "give 1 to 200 characters")
    return ReadOptions(
        bootstrap=_bootstrap(given),
        subscription=_subscription(given),
        starting=starting,
        ending=ending,
        max_offsets_per_trigger=max(most, least),
        min_offsets_per_trigger=least,
        max_trigger_delay_ms=_duration_ms(given, "maxTriggerDelay", DEFAULT_MAX_TRIGGER_DELAY_MS),
        min_partitions=_integer(given, "minPartitions", 1, 0),
        max_records_per_partition=most_records or None,
        isolation_level=_isolation_level(given),
        fail_on_data_loss=_boolean(given, "failOnDataLoss", default=True),
        fail_on_timestamp=_fails_on_timestamp(given),
        include_headers=_boolean(given, "includeHeaders", default=False),
        client_id=prefix,
        initial_offsets_file=given.get("initialoffsetsfile"),
        security=_security(given),
    )


def parse_write_options(options: Mapping[str, str], *, is_streaming: bool) -> WriteOptions:
    """Raises InvalidSetting."""
    given = _given(options, WRITE_OPTIONS)
    topic = given.get("topic")
    if topic is not None:
        _checked_topic("topic", topic)
    is_exactly_once = _boolean(given, "exactlyOnce", default=False)
    for name in _EXACTLY_ONCE:
        if name.lower() in given and not is_exactly_once:
            raise InvalidSetting(name, given[name.lower()], "it is for exactlyOnce=true: add that, or drop this")
    write_id = given.get("writeid")
    if write_id is not None and is_streaming:
        raise InvalidSetting("writeId", write_id, "it is for df.write: a stream has the id of its query, so drop it")
    if write_id is not None and not 1 <= len(write_id) <= 200:
        raise InvalidSetting("writeId", write_id, "give 1 to 200 characters")
    timeout_ms = _duration_ms(given, "transactionTimeout", DEFAULT_TRANSACTION_TIMEOUT_MS)
    if not 1_000 <= timeout_ms <= _MAX_TIMEOUT_MS:
        rule = f"give 1s or more, and at most {_MAX_TIMEOUT_MS} ms"
        raise InvalidSetting("transactionTimeout", given["transactiontimeout"], rule)
    return WriteOptions(_bootstrap(given), topic, is_exactly_once, timeout_ms, write_id, _security(given))


def _fails_on_timestamp(given: Mapping[str, str]) -> bool:
    name = "timestampOutOfRange"
    value = given.get(name.lower(), "error")
    if value.lower() not in ("error", "null"):
        raise InvalidSetting(name, value, "use error, or null for rows without a timestamp")
    return value.lower() == "error"


def _given(options: Mapping[str, str], known: Iterable[str]) -> dict[str, str]:
    """Return the options by their names in lower case. Raises InvalidSetting for an unknown name."""
    names = {name.lower(): name for name in (*known, *_SPARKS_OWN)}
    for name, value in options.items():
        if name.lower() not in names:
            close = get_close_matches(name.lower(), names, n=1)
            hint = f"did you mean {names[close[0]]}?" if close else f"the options are {', '.join(sorted(known))}"
            raise InvalidSetting(name, value, f"this option is not known; {hint}")
    return {name.lower(): value for name, value in options.items()}


def _bootstrap(given: Mapping[str, str]) -> str:
    values = {given[name] for name in _BOOTSTRAP if name in given}
    if len(values) != 1:
        rule = 'give brokers as "host:port,host:port"; kafka.bootstrap.servers is another name for the same'
        raise InvalidSetting("bootstrap.servers", " and ".join(sorted(values)) or None, rule)
    bootstrap = values.pop()
    parse_bootstrap(bootstrap)
    return bootstrap


def _security(given: Mapping[str, str]) -> Security:
    named = {name: given.get(name, given.get(f"kafka.{name}")) for name in KAFKA_NAMES}
    return from_kafka_names({name: value for name, value in named.items() if value is not None})


def _isolation_level(given: Mapping[str, str]) -> int:
    values = {given[name].strip().lower() for name in _ISOLATION if name in given} or {"read_uncommitted"}
    if len(values) != 1 or not values <= set(ISOLATION_LEVELS):
        rule = f"use {' or '.join(ISOLATION_LEVELS)}; kafka.isolation.level is another name for the same"
        raise InvalidSetting("isolation.level", " and ".join(sorted(values)), rule)
    return ISOLATION_LEVELS[values.pop()]


def _subscription(given: Mapping[str, str]) -> Subscription:
    named = {name: given[name.lower()] for name in _SUBSCRIPTIONS if name.lower() in given}
    if len(named) != 1:
        rule = 'give exactly one: subscribe="a,b", subscribePattern="a.*" or assign=\'{"a":[0,1]}\''
        raise InvalidSetting(" and ".join(named) or "subscribe", ", ".join(named.values()) or None, rule)
    name, value = named.popitem()
    if name == "subscribe":
        topics = [topic.strip() for topic in value.split(",")]
        return Subscription(topics=tuple(sorted({_checked_topic(name, topic) for topic in topics})))
    if name == "subscribePattern":
        try:
            re.compile(value)
        except re.error as error:
            raise InvalidSetting(name, value, f"it is not a Python regular expression: {error}") from error
        return Subscription(pattern=value)
    partitions = []
    rule = 'give JSON such as {"orders":[0,1]}'
    for topic, indexes in _json_object(name, value, rule).items():
        if not isinstance(indexes, list) or not indexes or not all(type(i) is int and i >= 0 for i in indexes):
            raise InvalidSetting(name, value, rule)
        partitions += [TopicPartition(_checked_topic(name, topic), index) for index in indexes]
    if not partitions:
        raise InvalidSetting(name, value, rule)
    return Subscription(partitions=tuple(sorted(set(partitions))))


def _bound(given: Mapping[str, str], side: str, default: int, allowed: tuple[int, ...]) -> Bound:
    strategy = given.get(f"{side}offsetsbytimestampstrategy", "error")
    if strategy not in ("error", "latest"):
        raise InvalidSetting(f"{side}OffsetsByTimestampStrategy", strategy, "use error or latest")
    rest, offsets, topic_ids = _offsets(given, f"{side}Offsets", default, allowed)
    timestamp = _integer(given, f"{side}Timestamp", 0, -1)
    return Bound(
        rest=rest,
        offsets=offsets,
        timestamps_ms=_timestamps(given, f"{side}OffsetsByTimestamp"),
        timestamp_ms=None if timestamp < 0 else timestamp,
        topic_ids=topic_ids,
        # A batch query whose end is a time in the future ends at the end of the log.
        unmatched_is_latest=side == "ending" or strategy == "latest",
    )


_WORDS = {"earliest": EARLIEST, "latest": LATEST}


def _offsets(
    given: Mapping[str, str], name: str, default: int, allowed: tuple[int, ...]
) -> tuple[int, dict[TopicPartition, int], dict[str, str]]:
    """(the rest, offsets by partition, topic ids)"""
    value = given.get(name.lower())
    if value is None:
        return default, {}, {}
    words = [word for word, meaning in _WORDS.items() if meaning in allowed]
    rule = (
        f'give {" or ".join(words)}, or JSON such as {{"orders":{{"0":23,"1":{allowed[0]}}}}} with '
        f"{' or '.join(str(number) for number in allowed)} for {' or '.join(words)}, and "
        f'"{REST}" for the partitions that it does not name'
    )
    if not value.lstrip().startswith("{"):
        if _WORDS.get(value.strip().lower()) not in allowed:
            raise InvalidSetting(name, value, rule)
        return _WORDS[value.strip().lower()], {}, {}
    offsets: dict[TopicPartition, int] = {}
    topic_ids: dict[str, str] = {}
    rest = default
    for topic, content in _json_object(name, value, rule).items():
        if topic == REST:
            number = _WORDS.get(content, content) if isinstance(content, str) else content
            if type(number) is not int or number not in allowed:
                raise InvalidSetting(name, value, rule)
            rest = number
            continue
        _checked_topic(name, topic)
        # Two forms: that of a checkpoint, with an id, and that of users.
        is_ours = isinstance(content, dict) and {"id", "offsets"} <= set(content) <= {"id", "offsets", "epochs"}
        if is_ours and isinstance(content["id"], str):
            topic_ids[topic] = content["id"]
            content = content["offsets"]
        for partition, offset in _by_partition(name, value, topic, content, rule).items():
            if offset not in allowed and not 0 <= offset <= _MAX_OFFSET:
                raise InvalidSetting(name, value, rule)
            offsets[partition] = offset
    return rest, offsets, topic_ids


def _timestamps(given: Mapping[str, str], name: str) -> dict[TopicPartition, int]:
    value = given.get(name.lower())
    timestamps: dict[TopicPartition, int] = {}
    if value is not None:
        rule = 'give JSON such as {"orders":{"0":1700000000000}}, in milliseconds since 1970'
        for topic, content in _json_object(name, value, rule).items():
            for partition, timestamp in _by_partition(name, value, _checked_topic(name, topic), content, rule).items():
                if not 0 <= timestamp <= _MAX_OFFSET:
                    raise InvalidSetting(name, value, rule)
                timestamps[partition] = timestamp
    return timestamps


def _by_partition(name: str, value: str, topic: str, content: Any, rule: str) -> dict[TopicPartition, int]:
    if not isinstance(content, dict):
        raise InvalidSetting(name, value, rule)
    numbers: dict[TopicPartition, int] = {}
    for index, number in content.items():
        if not (index.isascii() and index.isdigit()) or type(number) is not int:
            raise InvalidSetting(name, value, rule)
        numbers[TopicPartition(topic, int(index))] = number
    return numbers


def _json_object(name: str, value: str, rule: str) -> dict[str, Any]:
    try:
        content = json.loads(value)
    except ValueError as error:
        raise InvalidSetting(name, value, f"{rule} ({error})") from error
    if not isinstance(content, dict):
        raise InvalidSetting(name, value, rule)
    return content


def _checked_topic(name: str, topic: str) -> str:
    problem = topic_name_problem(topic)
    if problem is not None:
        raise InvalidSetting(name, topic, problem)
    return topic


def _integer(given: Mapping[str, str], name: str, lowest: int, default: int) -> int:
    value = given.get(name.lower())
    if value is None:
        return default
    text = value.strip()
    if not (text.isascii() and text.isdigit()) or not lowest <= int(text) <= _MAX_OFFSET:
        raise InvalidSetting(name, value, f"give a whole number of {lowest} or more")
    return int(text)


def _boolean(given: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = given.get(name.lower())
    if value is None:
        return default
    if value.strip().lower() not in ("true", "false"):
        raise InvalidSetting(name, value, "give true or false")
    return value.strip().lower() == "true"


def _duration_ms(given: Mapping[str, str], name: str, default: int) -> int:
    value = given.get(name.lower())
    if value is None:
        return default
    found = _DURATION.fullmatch(value.strip().lower())
    if found is None:
        raise InvalidSetting(name, value, "give a time such as 500ms, 30s, 15m or 1h (a bare number: milliseconds)")
    return int(found[1]) * _DURATION_MS[found[2] or "ms"]
