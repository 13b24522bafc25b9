from pathlib import Path

import pytest

from minibroker.broker.broker import network_settings
from minibroker.broker.settings.credentials import broker_secret, zookeeper_digest
from minibroker.broker.settings.layers import with_dynamic
from minibroker.broker.settings.listeners import parse_listeners
from minibroker.broker.settings.parsing import (
    CREATION_RATE,
    MAX_CONNECTIONS,
    broker_config,
    host_limits,
    listener_limits,
    read_properties,
    topic_config,
    topic_config_problem,
)
from minibroker.broker.settings.types import InvalidConfig
from minibroker.protocol.model import Endpoint
from minibroker.protocol.records import MAX_BATCH_BYTES
from minibroker.protocol.world.real import RealDisk

REQUIRED = {"broker.id": "1", "log.dirs": "/data", "zookeeper.connect": "127.0.0.1:2181"}


def test_settings_have_kafkas_names_and_typed_values() -> None:
    config = broker_config({**REQUIRED, "num.io.threads": "4", "listeners": "PLAINTEXT://h:1,CONTROLLER://h:2"})
    assert (config.broker_id, config.num_io_threads, config.replica_lag_time_max_ms) == (1, 4, 30_000)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("broker.id", "-1", "broker.id='-1': give a whole number from 0 to"),
        ("broker.id", "one", "broker.id='one': give a whole number from 0 to"),
        ("num.io.threads", "0", "num.io.threads='0': give a whole number from 1 to 1000"),
        ("unclean.leader.election.enable", "maybe", "unclean.leader.election.enable='maybe': give true or false"),
        ("log.retention.ms", "-2", "log.retention.ms='-2': give a whole number, -1 or more"),
        ("log.durability", "fsync", "log.durability='fsync': give replicated or synced"),
        ("min.insync.replicas", "many", "min.insync.replicas='many': give a whole number from 1"),
        ("metrics.listener", "9100", "metrics.listener='9100': give HOST:PORT, or nothing"),
        ("num.io.thread", "3", "num.io.thread"),
        ("max.connections.per.ip.overrides", "a", "overrides='a': give HOST:NUMBER,..., or nothing"),
        ("max.connections.per.ip.overrides", "a:1,", "give HOST:NUMBER,..., or nothing"),
        ("max.connections.per.ip.overrides", "a:-1", "give HOST:NUMBER,..., or nothing"),
        ("max.connections.per.ip", "0", r"list the addresses that may connect in max\.connections\.per\.ip\.overrides"),
        ("listener.name.plaintext.max.connections", "0", "max.connections='0': give a whole number from 1"),
        ("listener.name.plaintext.max.connections.per.ip", "5", "per.ip is not known: only .* can be set for one"),
        ("listener.name.other.max.connections", "5", "is for no listener"),
        ("listener.name.metrics.max.connections", "5", "this listener has no such limit"),
        ("listener.name.controller.max.connection.creation.rate", "5", "this listener has no such limit"),
        ("message.max.bytes", "400000000", "message.max.bytes='400000000': give a whole number from 1 to 67108925"),
        ("replica.fetch.wait.max.ms", "60000", "replica.lag.time.max.ms"),
        ("log.dirs", "/a,,/b", "names no directory"),
        ("log.dirs", "", "names no directory"),
        ("log.dirs", "/a,/b/../a", "names /a twice"),
        ("log.dirs", "/a/b,/a", "names /a/b and /a, and one is within the other"),
        ("broker.secret.file", "/a", r"both broker\.secret\.file and broker\.secret are set: keep one"),
    ],
)
def test_a_bad_setting_is_named_with_its_rule(name: str, value: str, said: str) -> None:
    with pytest.raises(InvalidConfig, match=said):
        broker_config({**REQUIRED, "broker.secret": "0123456789abcdef", name: value})


def test_listeners_and_hosts_have_limits_of_their_own() -> None:
    config = broker_config(
        {
            **REQUIRED,
            "listeners": "PLAINTEXT://h:1,Clients://h:2",
            "listener.name.clients.max.connections": " 7 ",
            "listener.name.clients.max.connection.creation.rate": "8",
            "listener.name.controller.max.connections": "9",
            "max.connections.per.ip": "0",
            "max.connections.per.ip.overrides": "server-1.example:10, 127.0.0.2:5,::1:4,[fe80::1]:3",
        }
    )
    assert listener_limits(config, MAX_CONNECTIONS) == {"Clients": 7, "CONTROLLER": 9}
    assert listener_limits(config, CREATION_RATE) == {"Clients": 8}
    assert host_limits(config) == {"server-1.example": 10, "127.0.0.2": 5, "::1": 4, "fe80::1": 3}
    assert host_limits(broker_config(REQUIRED)) == {}


@pytest.mark.parametrize(
    ("listeners", "protected"), [("PLAINTEXT://h:1", None), ("CLIENTS://h:1,INTERNAL://h:2", "INTERNAL")]
)
def test_the_listener_of_the_brokers_is_protected_if_clients_have_another_one(
    listeners: str, protected: str | None
) -> None:
    settings = {**REQUIRED, "listeners": listeners}
    if protected is not None:
        settings["inter.broker.listener.name"] = protected
    assert network_settings(broker_config(settings)).protected_listener == protected


def test_a_missing_setting_is_named() -> None:
    with pytest.raises(InvalidConfig, match=r"zookeeper\.connect is missing: give"):
        broker_config({"broker.id": "1", "log.dirs": "/data"})


@pytest.mark.parametrize("text", ["", "h:1", "PLAINTEXT://h", "PLAINTEXT://h:x", "A://h:1,A://h:2"])
def test_a_malformed_listener_is_refused(text: str) -> None:
    with pytest.raises(InvalidConfig, match="listeners"):
        parse_listeners("listeners", text)


def test_the_control_listener_is_there_even_where_nobody_asked_for_it() -> None:
    config = broker_config({**REQUIRED, "listeners": "PLAINTEXT://127.0.0.1:9092"})
    assert config.listener_endpoints()[1] == Endpoint("CONTROLLER", "127.0.0.1", 0)


def test_ports_that_were_taken_free_are_advertised() -> None:
    config = broker_config({**REQUIRED, "listeners": "PLAINTEXT://127.0.0.1:0"})
    advertised = config.advertised_endpoints({"PLAINTEXT": 5, "CONTROLLER": 6})
    assert advertised == [Endpoint("PLAINTEXT", "127.0.0.1", 5), Endpoint("CONTROLLER", "127.0.0.1", 6)]


@pytest.mark.parametrize(
    ("advertised", "said"),
    [
        ("PLAINTEXT://0.0.0.0:9092", "advertised.listeners has the host '0.0.0.0' .* give the host name"),
        ("PLAINTEXT://h:99999", "'PLAINTEXT://h:99999': .* a port from 0 to 65535"),
    ],
)
def test_an_address_that_cannot_be_advertised_is_refused_with_the_rule(advertised: str, said: str) -> None:
    config = broker_config({**REQUIRED, "advertised.listeners": advertised})
    with pytest.raises(InvalidConfig, match=said):
        config.advertised_endpoints({"PLAINTEXT": 9092, "CONTROLLER": 1})


def test_a_wildcard_address_must_be_advertised_as_something_else() -> None:
    config = broker_config({**REQUIRED, "listeners": "PLAINTEXT://0.0.0.0:9092"})
    with pytest.raises(InvalidConfig, match=r"advertised\.listeners"):
        config.advertised_endpoints({"PLAINTEXT": 9092, "CONTROLLER": 1})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("log.retention.ms", "retention.ms"),
        ("retention.hours", "retention.ms"),
        ("log.roll.hours", "segment.ms"),
        ("local.retention.m", "retention.ms"),
        ("log.preallocate", None),
    ],
)
def test_an_unknown_topic_setting_is_hinted_at_its_twin_or_the_closest_that_has_an_effect(
    name: str, meant: str | None
) -> None:
    with pytest.raises(InvalidConfig) as refused:
        topic_config({name: "5"})
    hint = "`minibroker configs describe" if meant is None else f"did you mean {meant}?"
    assert f"{name!r} is not known; {hint}" in str(refused.value)


@pytest.mark.parametrize(
    ("given", "retention_ms"),
    [
        ({"log.retention.hours": "2"}, 7_200_000),
        ({"log.retention.hours": "2", "log.retention.minutes": "3"}, 180_000),
        ({"log.retention.hours": "2", "log.retention.minutes": "3", "log.retention.ms": "4"}, 4),
        ({"log.retention.hours": "-1"}, -1),
        ({}, 604_800_000),
    ],
)
def test_a_coarser_unit_counts_where_no_finer_one_is_given(given: dict[str, str], retention_ms: int) -> None:
    config = broker_config({**REQUIRED, **given, "log.roll.hours": "1", "log.roll.jitter.hours": "0"})
    assert (config.log_retention_ms, config.log_roll_ms, config.log_roll_jitter_ms) == (retention_ms, 3_600_000, 0)
    for name, wrong in (("log.roll.hours", "0"), ("log.retention.minutes", "x"), ("log.retention.hours", "9" * 5000)):
        with pytest.raises(InvalidConfig, match=f"{name}='.* give a whole number from"):
            broker_config({**REQUIRED, name: wrong})


def test_topic_settings_are_checked_by_name_and_value() -> None:
    assert topic_config({"min.insync.replicas": "2"}).min_insync_replicas == 2
    broker = broker_config(REQUIRED)
    assert topic_config_problem({"min.insync.replicas": "2"}, broker) is None
    assert "min.insync.replicas" in str(topic_config_problem({"min.insync.replicas": "0"}, broker))
    assert "not known" in str(topic_config_problem({"min.insync": "1"}, broker))


def test_no_setting_allows_batches_that_readers_refuse() -> None:
    """`test_a_bad_setting_is_named_with_its_rule` tests this for a broker that starts."""
    broker = broker_config(REQUIRED)
    at_most = {"max.message.bytes": str(MAX_BATCH_BYTES)}
    assert topic_config_problem(at_most, broker) is None
    problem = str(topic_config_problem({"max.message.bytes": str(MAX_BATCH_BYTES + 1)}, broker))
    assert (
        problem
        == f"topic setting max.message.bytes='67108926': give a whole number from 1 to {MAX_BATCH_BYTES}, in bytes"
    )
    with pytest.raises(InvalidConfig, match="from 1 to 67108925"):
        with_dynamic(broker, {"message.max.bytes": "67108926"})


def test_a_topic_cannot_keep_records_from_compaction_for_longer_than_they_may_wait_for_it() -> None:
    broker = broker_config(REQUIRED)
    both = {"min.compaction.lag.ms": "2000", "max.compaction.lag.ms": "1000"}
    problem = str(topic_config_problem(both, broker))
    assert problem.startswith("min.compaction.lag.ms=2000 exceeds max.compaction.lag.ms=1000: ")
    assert topic_config_problem({**both, "max.compaction.lag.ms": "2000"}, broker) is None
    strict_settings = {**REQUIRED, "log.cleaner.max.compaction.lag.ms": "1500"}
    strict = broker_config(strict_settings)
    problem = str(topic_config_problem({"min.compaction.lag.ms": "2000"}, strict))
    assert "exceeds the brokers' log.cleaner.max.compaction.lag.ms=1500" in problem
    with pytest.raises(InvalidConfig, match="exceeds log.cleaner.max.compaction.lag.ms=1500"):
        broker_config(
            {**REQUIRED, "log.cleaner.max.compaction.lag.ms": "1500", "log.cleaner.min.compaction.lag.ms": "1501"}
        )


@pytest.mark.parametrize(
    ("name", "text", "rule"),
    [
        ("log.retention.ms", "1d", "a whole number, -1 or more, in milliseconds; 1d is 86400000"),
        ("log.retention.ms", "1.5 hours", "a whole number, -1 or more, in milliseconds; 1.5hours is 5400000"),
        ("log.retention.ms", "1 parsec", "a whole number, -1 or more, in milliseconds"),
        ("log.retention.ms", "0.1ms", "a whole number, -1 or more, in milliseconds"),
        ("log.flush.interval.ms", "10M", "a whole number, 0 or more, in milliseconds; 10M is 600000"),
        (
            "fetch.max.bytes",
            "1GB",
            f"a whole number from 1 to {2**31 - 1}, in bytes; 1GB is 1000000000; 1GiB is {2**30}",
        ),
        ("fetch.max.bytes", "64MiB", f"a whole number from 1 to {2**31 - 1}, in bytes; 64MiB is {64 * 2**20}"),
        ("log.segment.bytes", "10b", f"a whole number from 14 to {2**31 - 1}, in bytes"),  # 10 is refused as well
        ("log.cleaner.io.buffer.size", "512k", "in bytes; 512KB is 512000; 512KiB is 524288"),
        ("quota.window.size.seconds", "1m", "a whole number from 1 to 3600, in seconds; 1m is 60"),
        ("quota.window.size.seconds", "2h", "a whole number from 1 to 3600, in seconds"),
        ("offsets.retention.minutes", "7d", f"a whole number from 1 to {2**31 - 1}, in minutes; 7d is 10080"),
        ("log.retention.hours", "7d", f"a whole number from -1 to {2**31 - 1}, in hours; 7d is 168"),
        ("num.io.threads", "4h", "a whole number from 1 to 1000"),
    ],
)
def test_a_value_with_a_unit_is_refused_with_the_number_to_write(name: str, text: str, rule: str) -> None:
    with pytest.raises(InvalidConfig) as refused:
        broker_config({**REQUIRED, name: text})
    assert str(refused.value).endswith(rule)
    assert str(refused.value).startswith(f"broker setting {name}='{text}': give a whole number")


@pytest.mark.parametrize("text", ["1e6", "1.0", "1_000", "1 0", ""])
def test_only_digits_are_a_whole_number(text: str) -> None:
    name = "leader.replication.throttled.rate"
    with pytest.raises(InvalidConfig, match=f"{name}='{text}': give a whole number, 1 or more"):
        broker_config({**REQUIRED, name: text})


def test_a_missing_setting_is_named_with_what_it_may_be() -> None:
    with pytest.raises(InvalidConfig, match=r"log\.dirs is missing: give DIRECTORY,\.\.\."):
        broker_config({name: value for name, value in REQUIRED.items() if name != "log.dirs"})


def test_a_properties_file_gives_names_and_values(tmp_path: Path) -> None:
    path = tmp_path / "broker.properties"
    path.write_text("# comment\n\nbroker.id = 3\nlog.dirs=/data\n")
    assert read_properties(str(path)) == {"broker.id": "3", "log.dirs": "/data"}
    path.write_text("broker.id\n")
    with pytest.raises(InvalidConfig, match="line 1"):
        read_properties(str(path))
    with pytest.raises(InvalidConfig, match="nowhere"):
        read_properties(str(tmp_path / "nowhere"))


@pytest.mark.parametrize("text", ["0123456789abcdef", "0123456789abcdef\n", "  0123456789abcdef\r\n"])
def test_the_secret_is_what_stands_in_the_file_or_the_setting_without_white_space(tmp_path: Path, text: str) -> None:
    (tmp_path / "secret").write_text(text)
    from_file = broker_config({**REQUIRED, "broker.secret.file": str(tmp_path / "secret")})
    assert broker_secret(from_file, RealDisk()) == b"0123456789abcdef"
    assert broker_secret(broker_config({**REQUIRED, "broker.secret": text}), RealDisk()) == b"0123456789abcdef"
    assert broker_secret(broker_config(REQUIRED), RealDisk()) is None


def test_a_secret_that_is_missing_or_too_short_is_named_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    config = broker_config({**REQUIRED, "broker.secret.file": str(path)})
    with pytest.raises(InvalidConfig, match=f"broker.secret.file={path} cannot be read: No such file"):
        broker_secret(config, RealDisk())
    path.write_text("short\n")
    for too_short in (config, broker_config({**REQUIRED, "broker.secret": "short"})):
        with pytest.raises(InvalidConfig, match="has 5 bytes, but at least 16 are needed") as raised:
            broker_secret(too_short, RealDisk())
        assert "short" not in str(raised.value)


def test_the_credential_for_zookeeper_is_the_line_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "digest"
    path.write_text("minibroker:a:b\n")
    config = broker_config({**REQUIRED, "zookeeper.digest.file": str(path)})
    assert zookeeper_digest(config, RealDisk()) == "minibroker:a:b"
    assert zookeeper_digest(broker_config(REQUIRED), RealDisk()) is None


def test_a_credential_for_zookeeper_that_is_missing_or_malformed_is_named_and_never_shown(tmp_path: Path) -> None:
    path = tmp_path / "digest"
    config = broker_config({**REQUIRED, "zookeeper.digest.file": str(path)})
    with pytest.raises(InvalidConfig, match=f"zookeeper.digest.file={path} cannot be read: No such file"):
        zookeeper_digest(config, RealDisk())
    for malformed in ("password", ":password", "password:", "a:password b", ""):
        path.write_text(malformed)
        with pytest.raises(InvalidConfig, match=f"{path} does not hold NAME:PASSWORD, without white space") as raised:
            zookeeper_digest(config, RealDisk())
        assert "password" not in str(raised.value)
    path.write_bytes(b"\xff:a")
    with pytest.raises(InvalidConfig, match="is not text"):
        zookeeper_digest(config, RealDisk())
    with pytest.raises(InvalidConfig, match=r"zookeeper\.set\.acl is true without zookeeper\.digest\.file"):
        broker_config({**REQUIRED, "zookeeper.set.acl": "true"})


@pytest.mark.parametrize(
    ("name", "text", "means"),
    [
        ("cleanup.policy", "", ""),
        ("cleanup.policy", " compact ", "compact"),
        ("cleanup.policy", "compact, delete", "compact, delete"),
        ("cleanup.policy", "delete,delete", "delete,delete"),
        ("message.format.version", "0.10.2.0", "0.10.2.0"),
        ("retention.ms", " 5 ", 5),
        ("min.cleanable.dirty.ratio", "0.5 ", 0.5),
        ("unclean.leader.election.enable", " true", True),
    ],
)
def test_a_value_is_read_as_kafka_reads_it(name: str, text: str, means: object) -> None:
    assert getattr(topic_config({name: text}), name.replace(".", "_")) == means


def test_a_setting_that_is_mistyped_is_answered_with_the_one_that_is_meant() -> None:
    with pytest.raises(InvalidConfig, match=r"'min.insync.replica' is not known; did you mean min.insync.replicas\?"):
        topic_config({"min.insync.replica": "2"})
    with pytest.raises(
        InvalidConfig, match="'nope' is not known; `minibroker configs describe [^`]*` lists the known settings$"
    ):
        topic_config({"nope": "2"})


@pytest.mark.parametrize("name", ["retention.ms", "cleanup.policy"])
def test_a_value_of_any_length_leaves_room_for_the_rule(name: str) -> None:
    problem = topic_config_problem({name: "9" * 30_000}, broker_config(REQUIRED))
    assert problem is not None
    assert len(problem) < 400
    assert "(30000 characters): give " in problem


@pytest.mark.parametrize("line", ["broker.secret hunter22", "broker.secret hunter22=", "=hunter22"])
def test_a_line_of_a_file_without_a_name_is_not_shown(tmp_path: Path, line: str) -> None:
    path = tmp_path / "broker.properties"
    path.write_text(f"broker.id=3\n{line}\n")
    with pytest.raises(InvalidConfig, match=r"broker.properties, line 2 is not NAME=VALUE") as failed:
        read_properties(str(path))
    assert "hunter22" not in str(failed.value)
