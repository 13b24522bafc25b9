import json
from collections.abc import Callable
from random import Random

import pytest

from minibroker.protocol import znodes
from minibroker.protocol.model import NO_EPOCH, Endpoint, LeaderAndIsr, Member, RegisteredBroker, TopicPartition
from minibroker.protocol.znodes import MalformedZnode, ProducerIdBlock, TopicZnode

PARTITION = TopicPartition("orders", 3)


def _state(data: bytes) -> object:
    return znodes.decode_state(PARTITION, data, 1)


def _topic(data: bytes) -> object:
    return znodes.decode_topic("orders", data)


def _broker(data: bytes) -> object:
    return znodes.decode_broker(1, data, 1)


def _isr_change(data: bytes) -> object:
    return znodes.decode_isr_change("/x", data)


def _log_dir_event(data: bytes) -> object:
    return znodes.decode_log_dir_event("/x", data)


def test_a_broker_reads_back_with_the_epoch_of_its_znode() -> None:
    endpoints = [Endpoint("PLAINTEXT", "127.0.0.1", 9092), Endpoint("CONTROLLER", "::1", 9192)]
    data = znodes.encode_broker(endpoints, "r1", 1_529_210_278_988)
    assert znodes.decode_broker(7, data, 42) == RegisteredBroker(7, 42, tuple(endpoints), "r1")
    node = json.loads(data)
    assert (node["host"], node["port"], node["version"]) == ("127.0.0.1", 9092, 5)
    assert node["timestamp"] == "1529210278988"


def test_what_kafka_wrote_for_a_broker_is_understood() -> None:
    data = (
        b'{"listener_security_protocol_map":{"PLAINTEXT":"PLAINTEXT"},"endpoints":["PLAINTEXT://h:9092"],"jmx_port":9999,'
        b'"features":{},"host":"h","timestamp":"1","port":9092,"version":5,"tags":{}}'
    )
    broker = znodes.decode_broker(0, data, 5)
    assert (broker.endpoints, broker.trusted_since) == ((Endpoint("PLAINTEXT", "h", 9092),), 0)


@pytest.mark.parametrize(
    ("written", "means"), [(17, 17), (0, 0), (znodes.SINCE_THIS_REGISTRATION, 42), (99, 42)], ids=str
)
def test_a_broker_says_since_which_epoch_its_data_can_be_trusted(written: int, means: int) -> None:
    data = znodes.encode_broker([Endpoint("PLAINTEXT", "h", 9092)], None, 0, written)
    assert list(json.loads(data))[-3:] == ["trusted_since", "synced_since", "secret"]
    assert (broker := znodes.decode_broker(7, data, 42)).trusted_since == means
    assert broker.synced_since == means, "a broker that does not say: the same"
    of_what_is_flushed = znodes.encode_broker([Endpoint("PLAINTEXT", "h", 9092)], None, 0, 42, written)
    assert (broker := znodes.decode_broker(7, of_what_is_flushed, 42)).synced_since == means
    assert broker.trusted_since == 42


@pytest.mark.parametrize("endpoint", ["", "PLAINTEXT", "PLAINTEXT://h", "PLAINTEXT://h:x", "PLAINTEXT://h:99999"])
def test_a_malformed_endpoint_names_the_path(endpoint: str) -> None:
    with pytest.raises(MalformedZnode, match="/brokers/ids/7"):
        znodes.decode_broker(7, json.dumps({"endpoints": [endpoint]}).encode(), 1)


def test_a_topic_reads_back_with_its_partitions_in_order() -> None:
    topic = TopicZnode("abc", {10: (1, 2), 2: (3, 1)})
    data = znodes.encode_topic(topic)
    assert znodes.decode_topic("orders", data) == topic
    assert list(json.loads(data)["partitions"]) == ["2", "10"]
    assert json.loads(data)["version"] == 3


@pytest.mark.parametrize("partitions", [{"x": [1]}, {"-1": [1]}, {"0": []}, {"0": [1, 1]}])
def test_an_assignment_that_cannot_be_is_refused(partitions: dict[str, list[int]]) -> None:
    with pytest.raises(MalformedZnode, match="/brokers/topics/orders"):
        znodes.decode_topic("orders", json.dumps({"partitions": partitions, "topic_id": "x"}).encode())


def test_replicas_that_come_and_go_are_in_the_fields_that_kafka_has_for_them() -> None:
    topic = TopicZnode("abc", {0: (3, 1, 2), 1: (1,)}, {0: (3,)}, {0: (2,)})
    data = znodes.encode_topic(topic)
    assert json.loads(data)["adding_replicas"] == {"0": [3]}
    assert json.loads(data)["removing_replicas"] == {"0": [2]}
    assert znodes.decode_topic("orders", data) == topic


@pytest.mark.parametrize(
    "changing",
    [
        {"adding_replicas": {"0": [3]}},
        {"adding_replicas": {"1": [1]}},
        {"adding_replicas": {"x": [1]}},
        {"adding_replicas": {"0": [1, 1]}},
        {"adding_replicas": {"0": [1, 2]}},
        {"removing_replicas": {"0": [2, 1]}},
    ],
)
def test_replicas_that_cannot_come_or_go_are_refused(changing: dict[str, object]) -> None:
    with pytest.raises(MalformedZnode, match="/brokers/topics/orders"):
        znodes.decode_topic("orders", json.dumps({"partitions": {"0": [1, 2]}, **changing}).encode())


def test_reassignments_read_back_and_are_those_of_kafka() -> None:
    data = b'{"version":1,"partitions":[{"topic":"orders","partition":3,"replicas":[2,1]}]}'
    [entry] = znodes.decode_reassignments(data)
    assert entry == znodes.Reassignment(TopicPartition("orders", 3), (2, 1))
    assert znodes.encode_reassignments([entry]) == data


@pytest.mark.parametrize("name", ["..", "a/b", "", "a" * 250])
def test_a_topic_znode_with_an_illegal_name_is_refused(name: str) -> None:
    with pytest.raises(MalformedZnode):
        znodes.decode_topic(name, znodes.encode_topic(TopicZnode("abc", {0: (1,)})))


def test_a_state_reads_back_with_the_version_of_its_znode() -> None:
    state = LeaderAndIsr(leader=3, leader_epoch=2, isr=(3, 1), controller_epoch=7, partition_epoch=9)
    data = znodes.encode_state(state)
    assert znodes.decode_state(PARTITION, data, 9) == state
    assert json.loads(data) == {"controller_epoch": 7, "leader": 3, "version": 1, "leader_epoch": 2, "isr": [3, 1]}


def test_a_state_carries_the_epochs_of_its_members_and_who_is_eligible_at_its_end() -> None:
    state = LeaderAndIsr(3, 2, (3, 1), 7, 9, isr_epochs=(40, 20), eligible=(2,), eligible_epochs=(30,))
    data = znodes.encode_state(state)
    assert znodes.decode_state(PARTITION, data, 9) == state
    assert data.endswith(b'"version":1,"isr_epochs":[40,20],"eligible":[2],"eligible_epochs":[30]}')
    assert state.in_sync_members == (Member(3, 40), Member(1, 20))
    assert state.eligible_members == (Member(2, 30),)


def test_what_kafka_wrote_for_a_state_has_members_of_unknown_epochs() -> None:
    data = b'{"controller_epoch":7,"leader":3,"version":1,"leader_epoch":2,"isr":[3,1]}'
    assert znodes.decode_state(PARTITION, data, 9).in_sync_members == (Member(3, NO_EPOCH), Member(1, NO_EPOCH))


@pytest.mark.parametrize("fields", [{"isr_epochs": [1]}, {"eligible": [2], "eligible_epochs": [1, 2]}])
def test_epochs_that_do_not_fit_their_replicas_are_refused(fields: dict[str, list[int]]) -> None:
    node = {"controller_epoch": 7, "leader": 3, "leader_epoch": 2, "isr": [3, 1]}
    with pytest.raises(MalformedZnode, match="/brokers/topics/orders/partitions/3/state"):
        znodes.decode_state(PARTITION, json.dumps(node | fields).encode(), 9)


@pytest.mark.parametrize("nonsense", [2**31, -(2**31) - 1, 2**70], ids=str)
@pytest.mark.parametrize(
    ("fields", "decode"),
    [
        *(
            ({"controller_epoch": 7, "leader": 3, "leader_epoch": 2, "isr": [3], field: "?"}, _state)
            for field in ("controller_epoch", "leader", "leader_epoch", "min_insync_replicas")
        ),
        *(
            ({"controller_epoch": 7, "leader": 3, "leader_epoch": 2, "isr": [3], field: ["?"]}, _state)
            for field in ("isr", "eligible")
        ),
        ({"partitions": {"0": ["?"]}}, _topic),
        ({"partitions": {"?": [1]}}, _topic),
        ({"partitions": [{"topic": "orders", "partition": "?", "replicas": [1]}]}, znodes.decode_reassignments),
        ({"partitions": [{"topic": "orders", "partition": 0, "replicas": ["?"]}]}, znodes.decode_reassignments),
        ({"partitions": [{"topic": "orders", "partition": "?"}]}, znodes.decode_preferred_election),
        ({"version": 1, "partitions": [{"topic": "orders", "partition": "?"}]}, _isr_change),
        ({"version": 1, "broker": "?", "event": 1}, _log_dir_event),
        ({"version": 1, "brokerid": "?"}, znodes.decode_controller),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_number_that_no_message_can_hold_is_refused(
    fields: object, decode: Callable[[bytes], object], nonsense: int
) -> None:
    text = json.dumps(fields)
    written = text.replace('"?":', f'"{nonsense}":').replace('"?"', str(nonsense))
    with pytest.raises(MalformedZnode):
        decode(written.encode())
    decode(text.replace('"?":', '"3":').replace('"?"', "3").encode())


@pytest.mark.parametrize(
    ("fields", "decode"),
    [
        ({"isr_epochs": [2**63]}, _state),
        ({"eligible": [1], "eligible_epochs": [2**63]}, _state),
        ({"isr": list(range(1_001))}, _state),
        ({"leader_epoch": 2**31 - 1}, _state),
        ({"controller_epoch": 2**31 - 1}, _state),
        ({"partitions": {"0": list(range(1_001))}}, _topic),
        ({"topic_id": "x" * 23}, _topic),
        ({"trusted_since": -(2**70)}, _broker),
        ({"synced_since": 2**63}, _broker),
        ({"rack": "x" * 250}, _broker),
        ({"endpoints": ["P://h:1"] * 101}, _broker),
        ({"endpoints": [f"P://{'h' * 500}:1"]}, _broker),
        ({"endpoints": [f"{'P' * 250}://h:1"]}, _broker),
        ({"endpoints": ["P://h:" + "9" * 400]}, _broker),
        ({"block_end": str(2**63)}, znodes.decode_producer_id_block),
        ({"block_end": "9" * 5_000}, znodes.decode_producer_id_block),
    ],
    ids=lambda value: getattr(value, "__name__", str(value))[:60],
)
def test_what_no_message_can_hold_is_refused(fields: dict[str, object], decode: Callable[[bytes], object]) -> None:
    sound: dict[str, object] = {
        "controller_epoch": 7,
        "leader": 3,
        "leader_epoch": 2,
        "isr": [3],
        "partitions": {"0": [1]},
        "endpoints": ["P://h:1"],
        "version": 1,
        "broker": 1,
        "block_start": "0",
        "block_end": "1",
    }
    decode(json.dumps(sound).encode())
    with pytest.raises(MalformedZnode):
        decode(json.dumps(sound | fields).encode())


def test_the_controller_znode_is_kafkas() -> None:
    assert znodes.encode_controller(0, 1529210278988) == b'{"version":1,"brokerid":0,"timestamp":"1529210278988"}'
    assert znodes.decode_controller(b'{"version":2,"brokerid":4,"timestamp":"1","kraftControllerEpoch":-1}') == 4


@pytest.mark.parametrize("data", [b"", b"x", b"-1", b"\xff", b"2147483647", b"9" * 5_000])
def test_a_controller_epoch_that_is_no_number_is_refused(data: bytes) -> None:
    with pytest.raises(MalformedZnode, match="/controller_epoch"):
        znodes.decode_controller_epoch(data)


def test_small_znodes_read_back() -> None:
    assert znodes.decode_controller_epoch(znodes.encode_controller_epoch(12)) == 12
    assert znodes.decode_cluster_id(znodes.encode_cluster_id("abc")) == "abc"
    assert znodes.decode_isr_change("/x", znodes.encode_isr_change([PARTITION])) == [PARTITION]
    assert znodes.decode_config("/x", znodes.encode_config({"a": "b"})) == {"a": "b"}
    block = ProducerIdBlock(2, 1_000, 1_999)
    assert znodes.decode_producer_id_block(znodes.encode_producer_id_block(block)) == block
    assert znodes.decode_producer_id_block(b"") is None


def test_new_ids_have_22_characters_and_do_not_begin_with_a_dash() -> None:
    random = Random(1)
    ids = [znodes.new_uuid(random) for _ in range(2_000)]
    assert len(set(ids)) == 2_000
    assert all(len(i) == 22 and not i.startswith("-") for i in ids)


def test_the_event_of_a_log_directory_may_have_a_reason_of_bounded_length() -> None:
    assert _log_dir_event(b'{"version":1,"broker":3,"event":1}') == (3, "")  # Kafka's
    assert znodes.encode_log_dir_event(3) == b'{"version":1,"broker":3,"event":1}'
    assert _log_dir_event(znodes.encode_log_dir_event(3, "x" * 9_999)) == (3, "x" * znodes.MOST_REASON)
