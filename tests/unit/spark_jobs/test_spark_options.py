"""Options as text: the meaning of each, and the message for each mistake."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from minibroker.client.cli.terminal import security as command_config
from minibroker.client.errors import InvalidSetting
from minibroker.client.security import TokenFile
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.records import READ_COMMITTED, READ_UNCOMMITTED
from minibroker.spark_jobs.jobs import Source, security_options
from minibroker.spark_jobs.source.options import (
    DEFAULT_MAX_OFFSETS_PER_TRIGGER,
    EARLIEST,
    LATEST,
    Bound,
    ReadOptions,
    Subscription,
    WriteOptions,
    parse_include_headers,
    parse_read_options,
    parse_write_options,
)

BASE = {"bootstrap.servers": "localhost:9092", "subscribe": "orders"}
P0, P1 = TopicPartition("orders", 0), TopicPartition("orders", 1)


def batch(**options: str) -> ReadOptions:
    return parse_read_options(BASE | options, is_streaming=False)


def stream(**options: str) -> ReadOptions:
    return parse_read_options(BASE | options, is_streaming=True)


def problem(is_streaming: bool = False, base: Mapping[str, str] = BASE, **options: str) -> str:
    with pytest.raises(InvalidSetting) as caught:
        parse_read_options({**base, **options}, is_streaming=is_streaming)
    return str(caught.value)


def test_a_batch_reads_everything_and_a_stream_what_comes() -> None:
    assert (batch().starting, batch().ending) == (Bound(EARLIEST), Bound(LATEST, unmatched_is_latest=True))
    assert stream().starting == Bound(LATEST)


def test_names_are_understood_in_any_case() -> None:
    options = {"BOOTSTRAP.SERVERS": "localhost:9092", "Subscribe": "orders", "failondataloss": "FALSE"}
    parsed = parse_read_options(options, is_streaming=False)
    assert (parsed.bootstrap, parsed.subscription, parsed.fail_on_data_loss) == (
        "localhost:9092",
        Subscription(("orders",)),
        False,
    )


def test_bootstrap_servers_has_the_name_of_kafkas_connector_too() -> None:
    assert (
        parse_read_options({"kafka.bootstrap.servers": "a:1,b:2", "subscribe": "t"}, is_streaming=True).bootstrap
        == "a:1,b:2"
    )
    assert "bootstrap.servers='a:1 and b:2'" in problem(
        base={"kafka.bootstrap.servers": "a:1", "bootstrap.servers": "b:2", "subscribe": "t"}
    )
    assert "bootstrap.servers=None: give brokers" in problem(base={"subscribe": "orders"})
    assert "the port must be a number" in problem(base={"bootstrap.servers": "a:x", "subscribe": "orders"})


def test_the_isolation_level_has_the_name_of_kafkas_connector_too() -> None:
    assert batch().isolation_level == READ_UNCOMMITTED
    for name in ("isolation.level", "kafka.isolation.level"):
        assert parse_read_options(BASE | {name: "read_committed"}, is_streaming=False).isolation_level == READ_COMMITTED
    assert "isolation.level='committed': use read_uncommitted or read_committed" in problem(
        base=BASE | {"isolation.level": "committed"}
    )
    both = {"isolation.level": "read_committed", "kafka.isolation.level": "read_uncommitted"}
    assert "isolation.level='read_committed and read_uncommitted'" in problem(base=BASE | both)


def test_an_unknown_option_is_refused_with_the_name_that_was_probably_meant() -> None:
    assert "startingOffset='latest': this option is not known; did you mean startingOffsets?" in problem(
        startingOffset="latest"
    )
    assert "kafka.acks='1': this option is not known; the options are" in problem(base=BASE | {"kafka.acks": "1"})


def test_connections_are_protected_by_kafkas_settings() -> None:
    given = {
        "kafka.security.protocol": "SSL",
        "kafka.ssl.truststore.type": "PEM",
        "kafka.ssl.truststore.location": "ca.pem",
        "kafka.ssl.keystore.type": "PEM",
        "kafka.ssl.keystore.location": "me.pem",
        "kafka.ssl.key.password": "secret",
        "kafka.ssl.endpoint.identification.algorithm": "",
    }
    expected = {
        "security_protocol": "SSL",
        "ssl_cafile": "ca.pem",
        "ssl_certfile": "me.pem",
        "ssl_password": "secret",
        "ssl_check_hostname": False,
    }
    assert batch(**given).security == expected
    assert batch(**{name.removeprefix("kafka."): value for name, value in given.items()}).security == expected
    assert parse_write_options({"bootstrap.servers": "a:1", **given}, is_streaming=False).security == expected
    login = 'org.apache.kafka.common.security.scram.ScramLoginModule required username="shop" password="secret";'
    user = {"kafka.security.protocol": "SASL_SSL", "kafka.sasl.mechanism": "SCRAM-SHA-256"}
    expected = {
        "security_protocol": "SASL_SSL",
        "sasl_mechanism": "SCRAM-SHA-256",
        "sasl_plain_username": "shop",
        "sasl_plain_password": "secret",
    }
    assert batch(**user, **{"kafka.sasl.jaas.config": login}).security == expected
    parsed = batch(**user, **{"kafka.sasl.username": "shop", "kafka.sasl.password": "secret"})
    assert parsed.security == expected
    assert "secret" not in repr(parsed)
    token = {"kafka.sasl.mechanism": "OAUTHBEARER", "kafka.sasl.oauthbearer.token.endpoint.url": "file:///run/token"}
    assert batch(**{**user, **token}).security["sasl_mechanism"] == "OAUTHBEARER"
    assert "give PLAINTEXT, SSL, SASL" in problem(base=BASE | {"kafka.security.protocol": "TLS"})


_LOGIN = "org.apache.kafka.common.security"


@pytest.mark.parametrize(
    "settings",
    [
        "",
        "security.protocol=SSL\nssl.truststore.location=ca.pem\nssl.keystore.location=me.pem\nssl.key.password=secret",
        "security.protocol=SSL\nssl.endpoint.identification.algorithm=",
        "security.protocol=SASL_SSL\nssl.truststore.location=/ca.pem\nsasl.mechanism=SCRAM-SHA-512\n"
        f'sasl.jaas.config={_LOGIN}.scram.ScramLoginModule required username="a=b" password="s\\"ecret";',
        "security.protocol=SASL_PLAINTEXT\nsasl.mechanism=OAUTHBEARER\n"
        "sasl.oauthbearer.token.endpoint.url=file:///run/token",
    ],
)
def test_the_settings_of_a_file_become_options_with_absolute_paths(settings: str, tmp_path: Path) -> None:
    (tmp_path / "client.properties").write_text(settings)
    read: dict[str, object] = {**command_config.read(tmp_path / "client.properties")}
    options = security_options(command_config.read(tmp_path / "client.properties"))
    assert not options.keys() & {"sasl.jaas.config"}
    found: dict[str, object] = {**batch(**options).security}
    for name, value in read.items():
        if name in ("ssl_cafile", "ssl_certfile"):
            read[name] = str(Path(str(value)).absolute())
        elif isinstance(value, TokenFile):
            provider = found[name]
            assert isinstance(provider, TokenFile)
            assert provider.url == value.url == "file:///run/token"
            read[name] = provider
    assert found == read
    assert "secret" not in repr(Source("a:1", ["t"], security=options))


def test_sparks_own_options_are_let_pass() -> None:
    assert stream(checkpointLocation="/tmp/c", queryName="q") == stream()


def test_subscribe_takes_several_topics() -> None:
    assert batch(subscribe="b, a,b").subscription == Subscription(topics=("a", "b"))
    assert "subscribe='a/b'" in problem(subscribe="a/b")
    assert "subscribe=''" in problem(subscribe="")


def test_subscribe_pattern_matches_whole_names() -> None:
    pattern = parse_read_options(
        {"bootstrap.servers": "a:1", "subscribePattern": "or.*s"}, is_streaming=True
    ).subscription
    assert [name for name in ("orders", "orders2", "xorders", "ors") if pattern.wants_topic(name)] == ["orders", "ors"]
    assert "is not a Python regular expression" in problem(base={"bootstrap.servers": "a:1"}, subscribePattern="(")


def test_assign_names_partitions() -> None:
    options = {"bootstrap.servers": "a:1", "assign": '{"orders":[1,0,1],"b":[2]}'}
    subscription = parse_read_options(options, is_streaming=True).subscription
    assert subscription.partitions == (TopicPartition("b", 2), P0, P1)
    assert subscription.wants(P0)
    assert not subscription.wants(TopicPartition("b", 0))
    for wrong in ("[]", "{}", "orders", '{"orders":[]}', '{"orders":["0"]}', '{"orders":[-1]}', '{"orders":0}'):
        assert "assign=" in problem(base={"bootstrap.servers": "a:1"}, assign=wrong)


def test_exactly_one_subscription_is_given() -> None:
    assert "give exactly one" in problem(base={"bootstrap.servers": "a:1"})
    assert "subscribe and assign=" in problem(assign='{"orders":[0]}')


def test_starting_offsets_are_a_word_or_json_with_a_default_for_the_rest() -> None:
    assert stream(startingOffsets="Earliest").starting == Bound(EARLIEST)
    bound = stream(startingOffsets='{"orders":{"0":23,"1":-2}}').starting
    assert [bound.offset_of(partition) for partition in (P0, P1, TopicPartition("orders", 2))] == [23, -2, LATEST]
    assert stream(startingOffsets='{"orders":{"0":23},"*":"earliest"}').starting.rest == EARLIEST
    assert stream(startingOffsets='{"*":-2}').starting.rest == EARLIEST
    assert batch(startingOffsets='{"orders":{"0":23}}').starting.rest == EARLIEST


def test_offsets_can_be_given_as_a_checkpoint_has_them() -> None:
    bound = batch(startingOffsets='{"orders":{"id":"abc","offsets":{"0":23}}}').starting
    assert (bound.offsets, bound.topic_ids) == ({P0: 23}, {"orders": "abc"})


@pytest.mark.parametrize(
    "wrong",
    [
        "first",
        "{",
        "[1]",
        '{"orders":5}',
        '{"orders":{"0":"5"}}',
        '{"orders":{"zero":5}}',
        '{"orders":{"0":-3}}',
        '{"orders":{"0":true}}',
        '{"*":5}',
        '{"*":"middle"}',
        '{"orders":{"id":5,"offsets":{"0":1}}}',
    ],
)
def test_wrong_starting_offsets_are_reported_with_the_rule(wrong: str) -> None:
    text = problem(True, startingOffsets=wrong)
    assert repr(wrong) in text
    assert "give earliest or latest, or JSON such as" in text


def test_a_batch_cannot_begin_at_the_end_or_end_at_the_beginning() -> None:
    assert "give earliest, or JSON" in problem(startingOffsets="latest")
    assert "give earliest, or JSON" in problem(startingOffsets='{"orders":{"0":-1}}')
    assert "give latest, or JSON" in problem(endingOffsets="earliest")
    assert "give latest, or JSON" in problem(endingOffsets='{"orders":{"0":-2}}')


def test_ending_options_are_for_batches() -> None:
    ending = batch(
        endingOffsets='{"orders":{"0":9}}', endingTimestamp="5", endingOffsetsByTimestamp='{"orders":{"1":7}}'
    ).ending
    assert (ending.offsets, ending.timestamp_ms, ending.timestamps_ms) == ({P0: 9}, 5, {P1: 7})
    for name, value in (
        ("endingOffsets", "latest"),
        ("endingTimestamp", "5"),
        ("endingOffsetsByTimestamp", '{"orders":{"0":1}}'),
    ):
        assert f"{name}={value!r}: a stream has no end" in problem(True, base=BASE | {name: value})


def test_a_timestamp_for_all_wins_over_one_for_a_partition_over_offsets() -> None:
    bound = batch(startingOffsetsByTimestamp='{"orders":{"0":7}}', startingOffsets='{"orders":{"0":1,"1":2}}').starting
    assert [bound.timestamp_of(partition) for partition in (P0, P1)] == [7, None]
    assert bound.offset_of(P1) == 2
    bound = batch(startingTimestamp="5", startingOffsetsByTimestamp='{"orders":{"0":7}}').starting
    assert [bound.timestamp_of(partition) for partition in (P0, P1)] == [5, 5]


@pytest.mark.parametrize("wrong", ["x", '{"orders":5}', '{"orders":{"0":-5}}', '{"orders":{"0":"1"}}', "[]"])
def test_wrong_timestamps_are_reported_with_the_rule(wrong: str) -> None:
    assert "in milliseconds since 1970" in problem(startingOffsetsByTimestamp=wrong)
    assert "endingTimestamp='-1'" in problem(endingTimestamp="-1")


def test_the_strategy_says_what_to_do_where_no_record_is_as_young() -> None:
    assert not batch().starting.unmatched_is_latest
    assert batch(startingOffsetsByTimestampStrategy="latest").starting.unmatched_is_latest
    assert batch().ending.unmatched_is_latest
    assert "use error or latest" in problem(startingOffsetsByTimestampStrategy="skip")


def test_rates_of_a_stream_have_defaults_and_bounds() -> None:
    assert stream().max_offsets_per_trigger == DEFAULT_MAX_OFFSETS_PER_TRIGGER
    options = stream(maxOffsetsPerTrigger="100", minOffsetsPerTrigger="10", maxTriggerDelay="2m")
    assert (options.max_offsets_per_trigger, options.min_offsets_per_trigger, options.max_trigger_delay_ms) == (
        100,
        10,
        120_000,
    )
    assert stream(minOffsetsPerTrigger="20000000").max_offsets_per_trigger == 20_000_000
    assert "maxOffsetsPerTrigger='0': give a whole number of 1 or more" in problem(True, maxOffsetsPerTrigger="0")
    assert "must not be above" in problem(True, maxOffsetsPerTrigger="5", minOffsetsPerTrigger="6")
    assert "minOffsetsPerTrigger='-1'" in problem(True, minOffsetsPerTrigger="-1")
    assert "it is for spark.readStream" in problem(maxOffsetsPerTrigger="5")


@pytest.mark.parametrize(
    ("text", "expected"), [("250", 250), ("30s", 30_000), ("15m", 900_000), ("1 h", 3_600_000), ("5MS", 5)]
)
def test_delays_have_units(text: str, expected: int) -> None:
    assert stream(maxTriggerDelay=text).max_trigger_delay_ms == expected


def test_a_wrong_delay_is_reported_with_the_rule() -> None:
    assert "maxTriggerDelay='soon': give a time such as" in problem(True, maxTriggerDelay="soon")


def test_splits_are_asked_for_by_number_or_by_size() -> None:
    assert (batch().min_partitions, batch().max_records_per_partition) == (0, None)
    options = batch(minPartitions="8", maxRecordsPerPartition="1000")
    assert (options.min_partitions, options.max_records_per_partition) == (8, 1_000)
    assert "minPartitions='0'" in problem(minPartitions="0")
    assert "maxRecordsPerPartition='many'" in problem(maxRecordsPerPartition="many")


def test_switches_are_true_or_false() -> None:
    assert (batch().fail_on_data_loss, batch().include_headers) == (True, False)
    options = batch(failOnDataLoss="false", includeHeaders="True")
    assert (options.fail_on_data_loss, options.include_headers) == (False, True)
    assert "failOnDataLoss='no': give true or false" in problem(failOnDataLoss="no")
    assert "includeHeaders='1'" in problem(includeHeaders="1")
    assert parse_include_headers({"INCLUDEHEADERS": "true"})


def test_a_timestamp_beyond_sparks_range_is_an_error_or_null() -> None:
    assert batch().fail_on_timestamp
    assert not batch(timestampOutOfRange="null").fail_on_timestamp
    assert "timestampOutOfRange='clamp': use error, or null" in problem(timestampOutOfRange="clamp")


def test_a_group_id_prefix_names_the_client() -> None:
    assert batch(groupIdPrefix="billing").client_id == "billing"
    assert "groupIdPrefix=''" in problem(groupIdPrefix="")


def test_initial_offsets_are_kept_by_streams_alone() -> None:
    assert stream(initialOffsetsFile="/c/initial.json").initial_offsets_file == "/c/initial.json"
    assert "it is for spark.readStream" in problem(initialOffsetsFile="/c/initial.json")


def written(*, is_streaming: bool = False, **options: str) -> WriteOptions:
    return parse_write_options({"bootstrap.servers": "a:1", **options}, is_streaming=is_streaming)


def test_writing_needs_brokers_and_may_name_a_topic() -> None:
    assert written().topic is None
    options = {"kafka.bootstrap.servers": "a:1", "topic": "t", "checkpointLocation": "c"}
    assert parse_write_options(options, is_streaming=True).topic == "t"
    for options in ({"topic": "t"}, {"bootstrap.servers": "a:1", "topic": "a b"}, BASE):
        with pytest.raises(InvalidSetting):
            parse_write_options(options, is_streaming=False)


def test_exactly_once_has_options_of_its_own() -> None:
    assert not written().is_exactly_once
    given = written(exactlyOnce="true", transactionTimeout="90s", writeId="load-1")
    assert (given.is_exactly_once, given.transaction_timeout_ms, given.write_id) == (True, 90_000, "load-1")
    assert written(exactlyOnce="true", is_streaming=True).transaction_timeout_ms == 900_000
    for options, is_streaming, expected in (
        ({"transactionTimeout": "90s"}, True, "transactionTimeout='90s': it is for exactlyOnce=true"),
        ({"writeId": "a", "exactlyOnce": "false"}, False, "writeId='a': it is for exactlyOnce=true"),
        ({"writeId": "a", "exactlyOnce": "true"}, True, "it is for df.write: a stream has the id of its query"),
        ({"writeId": "", "exactlyOnce": "true"}, False, "writeId='': give 1 to 200 characters"),
        ({"transactionTimeout": "10ms", "exactlyOnce": "true"}, True, "transactionTimeout='10ms': give 1s or more"),
    ):
        with pytest.raises(InvalidSetting, match=expected):
            written(is_streaming=is_streaming, **options)
