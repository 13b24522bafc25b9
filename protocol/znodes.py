"""Every ZooKeeper path and the JSON under it.

The JSON is Kafka 3.9's, field for field, so that `zkCli get` shows Kafka's users what they know; our own fields come
last. Decoders accept Kafka's data, ignore unknown fields, and raise `MalformedZnode` with the path for anything else,
since a znode can be written by hand.

Numbers, texts and lists have the bounds of the messages that carry them on (`messages`). Otherwise one number that no
message can hold would keep the controller from sending the state of all other partitions.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from random import Random
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.messages import BrokerEpochs, Int32, Int64, Name, Replicas, TopicId
from minibroker.protocol.model import (
    DEFAULT_LISTENER,
    PLAINTEXT,
    Endpoint,
    LeaderAndIsr,
    RegisteredBroker,
    ReplicaAssignment,
    TopicPartition,
    topic_name_problem,
)

SINCE_THIS_REGISTRATION = -1
"""A `trusted_since` that stands for the broker epoch of the znode itself, which is unknown before its creation."""

BROKERS = "/brokers"
BROKER_IDS = "/brokers/ids"
BROKER_SEQUENCE_IDS = "/brokers/seqid"
TOPICS = "/brokers/topics"
CONTROLLER = "/controller"
CONTROLLER_EPOCH = "/controller_epoch"
CLUSTER = "/cluster"
CLUSTER_ID = "/cluster/id"
ISR_CHANGES = "/isr_change_notification"
ISR_CHANGE_PREFIX = "/isr_change_notification/isr_change_"
LOG_DIR_EVENTS = "/log_dir_event_notification"
LOG_DIR_EVENT_PREFIX = "/log_dir_event_notification/log_dir_event_"
ADMIN = "/admin"
DELETE_TOPICS = "/admin/delete_topics"
PREFERRED_REPLICA_ELECTION = "/admin/preferred_replica_election"
REASSIGN_PARTITIONS = "/admin/reassign_partitions"
CONFIG = "/config"
TOPIC_CONFIGS = "/config/topics"
CLIENT_CONFIGS = "/config/clients"
USER_CONFIGS = "/config/users"
BROKER_CONFIGS = "/config/brokers"
IP_CONFIGS = "/config/ips"
CONFIG_CHANGES = "/config/changes"
CONFIG_CHANGE_PREFIX = "/config/changes/config_change_"
DEFAULT_ENTITY = "<default>"
"""Takes the place of a broker's id for the settings of all brokers."""
CONSUMERS = "/consumers"
PRODUCER_ID_BLOCK = "/latest_producer_id_block"

PERSISTENT_PATHS = (
    CONSUMERS,
    BROKERS,
    BROKER_IDS,
    BROKER_SEQUENCE_IDS,
    TOPICS,
    CLUSTER,
    ISR_CHANGES,
    LOG_DIR_EVENTS,
    ADMIN,
    DELETE_TOPICS,
    CONFIG,
    TOPIC_CONFIGS,
    CLIENT_CONFIGS,
    USER_CONFIGS,
    BROKER_CONFIGS,
    IP_CONFIGS,
    CONFIG_CHANGES,
    PRODUCER_ID_BLOCK,
)
"""The paths that every broker ensures when it starts, parents first. They are those of Kafka's brokers
(`persistentZkPaths` and `ConfigType`), as tools for Kafka expect them. Some stay empty here."""


MAX_EPOCH = 2**30
"""The highest epoch of a leader or controller: half of the largest number in a message, as epochs are counted up."""
MAX_PRODUCER_ID = 2**62
"""The highest producer id of a block: half of the largest number in a message, as later blocks follow it."""
MAX_INT32 = 2**31 - 1
MAX_LISTENER_LENGTH = 249
Epoch = Annotated[int, Meta(ge=-1, le=MAX_EPOCH)]


class MalformedZnode(MinibrokerError, ValueError):
    """The data of a znode is not valid for its path. The text names the path and the field."""


def broker_path(broker_id: int) -> str:
    return f"{BROKER_IDS}/{broker_id}"


def topic_path(topic: str) -> str:
    return f"{TOPICS}/{topic}"


def topic_id_path(topic: str, topic_id: str) -> str:
    """Return the path of a node that exists as long as the topic with this id, beside Kafka's `partitions`.

    When a write reaches ZooKeeper, the topic may have been deleted and created again, with nodes whose versions begin
    at 0 again. A `multi` with a Check of this node cannot change another topic of that name, since ids are never
    reused. (ZooKeeper cannot check a node's data.)"""
    return f"{TOPICS}/{topic}/id-{topic_id}"


def partitions_path(topic: str) -> str:
    return f"{TOPICS}/{topic}/partitions"


def partition_path(partition: TopicPartition) -> str:
    return f"{TOPICS}/{partition.topic}/partitions/{partition.partition}"


def state_path(partition: TopicPartition) -> str:
    return f"{TOPICS}/{partition.topic}/partitions/{partition.partition}/state"


def topic_config_path(topic: str) -> str:
    return f"{TOPIC_CONFIGS}/{topic}"


def broker_config_path(broker_id: int | None) -> str:
    """Return the path of a broker's settings, or for None of those of all brokers."""
    return f"{BROKER_CONFIGS}/{DEFAULT_ENTITY if broker_id is None else broker_id}"


def delete_topic_path(topic: str) -> str:
    return f"{DELETE_TOPICS}/{topic}"


def number(text: str, most: int = MAX_INT32) -> int | None:
    """Return the number in a text or the name of a znode, or None if it is not a number of at most `most`."""
    if not text.isdecimal() or len(text) > len(str(most)):
        return None
    value = int(text)
    return value if value <= most else None


def _decode(path: str, data: bytes, schema: Any, remedy: str = "; correct or delete it") -> Any:
    """`remedy` is empty for a node that its reader removes."""
    try:
        return msgspec.json.decode(data, type=schema)
    except msgspec.MsgspecError as error:
        raise MalformedZnode(f"the znode {path} holds {data[:120]!r}: {error}{remedy}") from error


# --- /brokers/ids/N ------------------------------------------------------------------------------------------


class _BrokerJson(msgspec.Struct):
    endpoints: Annotated[list[Annotated[str, Meta(max_length=500)]], Meta(max_length=100)]
    listener_security_protocol_map: dict[str, str] = {}
    jmx_port: int = -1
    features: dict[str, Any] = {}
    host: str | None = None
    timestamp: str = "-1"
    port: int = -1
    version: int = 5
    rack: Name | None = None
    trusted_since: Int64 = 0
    synced_since: Int64 | None = None
    """None: as `trusted_since`."""
    secret: str | None = None
    """None: the broker has an earlier version, which does not write it."""


def encode_broker(
    endpoints: Sequence[Endpoint],
    rack: str | None,
    timestamp_ms: int,
    trusted_since: int = 0,
    synced_since: int | None = None,
    secret: str | None = None,
) -> bytes:
    """Encode a broker's registration. `trusted_since` and `synced_since`: as in `RegisteredBroker`, or
    SINCE_THIS_REGISTRATION; if `synced_since` is None, it equals `trusted_since`. `secret`: the secret's fingerprint
    (`broker_proof`)."""
    plain = next((e for e in endpoints if e.listener == DEFAULT_LISTENER), None)
    return msgspec.json.encode(
        _BrokerJson(
            endpoints=[f"{e.listener}://{e.host}:{e.port}" for e in endpoints],
            listener_security_protocol_map={e.listener: e.security_protocol for e in endpoints},
            host=plain.host if plain else None,
            port=plain.port if plain else -1,
            timestamp=str(timestamp_ms),
            rack=rack,
            trusted_since=trusted_since,
            synced_since=synced_since,
            secret=secret,
        )
    )


def decode_broker(broker_id: int, data: bytes, epoch: int) -> RegisteredBroker:
    """Decode a broker's registration. `epoch` is the czxid of the znode. Raises MalformedZnode."""
    path = broker_path(broker_id)
    node: _BrokerJson = _decode(path, data, _BrokerJson)
    endpoints = []
    for text in node.endpoints:
        listener, separator, address = text.partition("://")
        host, colon, port = address.rpartition(":")
        port_number = number(port, 65_535)
        if not (separator and colon and len(listener) <= MAX_LISTENER_LENGTH) or port_number is None:
            raise MalformedZnode(f"the znode {path} has an endpoint {text!r}: NAME://HOST:PORT is expected")
        protocol = node.listener_security_protocol_map.get(listener, PLAINTEXT)
        endpoints.append(Endpoint(listener, host.removeprefix("[").removesuffix("]"), port_number, protocol))
    synced_since = node.trusted_since if node.synced_since is None else node.synced_since
    return RegisteredBroker(
        broker_id,
        epoch,
        tuple(endpoints),
        node.rack,
        _since(node.trusted_since, epoch),
        _since(synced_since, epoch),
    )


def decode_secret(broker_id: int, data: bytes) -> str | None:
    """Return the fingerprint of the secret in a broker's znode; None if it has none. Raises MalformedZnode."""
    node: _BrokerJson = _decode(broker_path(broker_id), data, _BrokerJson)
    return node.secret


def _since(said: int, epoch: int) -> int:
    # An epoch above the znode's own comes from another ZooKeeper; the znode's own replaces it.
    return epoch if said == SINCE_THIS_REGISTRATION else min(said, epoch)


# --- /brokers/topics/T ---------------------------------------------------------------------------------------


class TopicZnode(msgspec.Struct, frozen=True):
    """The assignment of a topic: replicas per partition, the preferred leader first.

    `adding_replicas` and `removing_replicas` have only partitions that are being reassigned (`ReplicaAssignment`)."""

    topic_id: str
    partitions: dict[int, tuple[int, ...]]
    adding_replicas: dict[int, tuple[int, ...]] = {}
    removing_replicas: dict[int, tuple[int, ...]] = {}

    def assignment(self, partition: int) -> ReplicaAssignment:
        return ReplicaAssignment(
            self.partitions[partition],
            self.adding_replicas.get(partition, ()),
            self.removing_replicas.get(partition, ()),
        )

    def reassigned(self, changed: Mapping[int, ReplicaAssignment]) -> TopicZnode:
        """Return the topic with other replicas of these partitions."""
        return TopicZnode(
            self.topic_id,
            {**self.partitions, **{p: assignment.replicas for p, assignment in changed.items()}},
            _replaced(self.adding_replicas, {p: assignment.adding for p, assignment in changed.items()}),
            _replaced(self.removing_replicas, {p: assignment.removing for p, assignment in changed.items()}),
        )


def _replaced(
    before: Mapping[int, tuple[int, ...]], changed: Mapping[int, tuple[int, ...]]
) -> dict[int, tuple[int, ...]]:
    return {p: replicas for p, replicas in sorted({**before, **changed}.items()) if replicas}


class _TopicJson(msgspec.Struct):
    partitions: dict[str, Replicas]
    topic_id: TopicId = ""
    removing_replicas: dict[str, Replicas] = {}
    adding_replicas: dict[str, Replicas] = {}
    version: int = 3


def encode_topic(topic: TopicZnode) -> bytes:
    return msgspec.json.encode(
        _TopicJson(
            partitions=_named(topic.partitions),
            topic_id=topic.topic_id,
            removing_replicas=_named(topic.removing_replicas),
            adding_replicas=_named(topic.adding_replicas),
        )
    )


def _named(replicas_of: Mapping[int, Sequence[int]]) -> dict[str, list[int]]:
    return {str(p): list(replicas) for p, replicas in sorted(replicas_of.items())}


def decode_topic(name: str, data: bytes) -> TopicZnode:
    """Decode a topic. Raises MalformedZnode, also for an illegal name, which would become a directory."""
    path = topic_path(name)
    problem = topic_name_problem(name)
    if problem:
        raise MalformedZnode(f"the znode {path} is not a topic: {problem}")
    node: _TopicJson = _decode(path, data, _TopicJson, "; correct it")
    if node.topic_id and topic_name_problem(node.topic_id):  # it becomes the name of a znode
        raise MalformedZnode(
            f"the znode {path} has the topic_id {node.topic_id[:80]!r}: a-z A-Z 0-9 . _ - are legal; correct it"
        )
    partitions: dict[int, tuple[int, ...]] = {}
    for key, replicas in node.partitions.items():
        partition = number(key)
        if partition is None or not replicas or len(set(replicas)) != len(replicas):
            raise MalformedZnode(f"the znode {path} assigns {replicas} to partition {key!r}; correct it")
        partitions[partition] = tuple(replicas)
    adding, removing = (
        _changing(path, field, changing, partitions)
        for field, changing in (
            ("adding_replicas", node.adding_replicas),
            ("removing_replicas", node.removing_replicas),
        )
    )
    topic = TopicZnode(node.topic_id, dict(sorted(partitions.items())), adding, removing)
    for changing in (*adding, *removing):
        assignment = topic.assignment(changing)
        if not (assignment.target and assignment.origin):
            raise MalformedZnode(
                f"the znode {path} leaves no replica of partition {changing} that was there before, or none that is "
                f"there in the end: {assignment}; correct adding_replicas and removing_replicas"
            )
    return topic


def _changing(
    path: str, field: str, changing: Mapping[str, list[int]], partitions: Mapping[int, tuple[int, ...]]
) -> dict[int, tuple[int, ...]]:
    found: dict[int, tuple[int, ...]] = {}
    for key, replicas in changing.items():
        partition = number(key)
        if (
            partition is None
            or not set(replicas) <= set(partitions.get(partition, ()))
            or len(set(replicas)) != len(replicas)
        ):
            raise MalformedZnode(
                f"the znode {path} names {replicas} for partition {key!r} in {field}: only replicas of the partition "
                "can be there, each once; correct it"
            )
        if replicas:
            found[partition] = tuple(replicas)
    return dict(sorted(found.items()))


def new_uuid(random: Random) -> str:
    """Return a random id in Kafka's form: 16 bytes as URL-safe base64 without padding, not beginning with a dash."""
    while True:
        text = base64.urlsafe_b64encode(random.randbytes(16)).rstrip(b"=").decode()
        if not text.startswith("-"):
            return text


# --- /brokers/topics/T/partitions/P/state ----------------------------------------------------------------------


class _StateJson(msgspec.Struct):
    controller_epoch: Epoch
    leader: Int32
    leader_epoch: Epoch
    isr: Replicas
    version: int = 1
    isr_epochs: BrokerEpochs | UnsetType = UNSET
    eligible: Replicas | UnsetType = UNSET
    eligible_epochs: BrokerEpochs | UnsetType = UNSET
    min_insync_replicas: Int32 | UnsetType = UNSET


def encode_state(state: LeaderAndIsr) -> bytes:
    return msgspec.json.encode(
        _StateJson(
            controller_epoch=state.controller_epoch,
            leader=state.leader,
            leader_epoch=state.leader_epoch,
            isr=list(state.isr),
            isr_epochs=list(state.isr_epochs) or UNSET,
            eligible=list(state.eligible) or UNSET,
            eligible_epochs=list(state.eligible_epochs) or UNSET,
            min_insync_replicas=state.to_commit or UNSET,
        )
    )


def decode_state(partition: TopicPartition, data: bytes, version: int) -> LeaderAndIsr:
    """Decode a partition's state. `version` is the data version of the znode: the partition epoch."""
    path = state_path(partition)
    node: _StateJson = _decode(path, data, _StateJson, "; correct it")
    isr_epochs, eligible, eligible_epochs = map(_given, (node.isr_epochs, node.eligible, node.eligible_epochs))
    for name, replicas, epochs in (("isr", node.isr, isr_epochs), ("eligible", eligible, eligible_epochs)):
        if epochs and len(epochs) != len(replicas):
            raise MalformedZnode(
                f"the znode {path} has {len(epochs)} {name}_epochs for {len(replicas)} replicas in {name}: give one "
                f"for each, or leave {name}_epochs out to have all of them trusted"
            )
    return LeaderAndIsr(
        node.leader,
        node.leader_epoch,
        tuple(node.isr),
        node.controller_epoch,
        version,
        isr_epochs,
        eligible,
        eligible_epochs,
        0 if isinstance(node.min_insync_replicas, UnsetType) else max(node.min_insync_replicas, 0),
    )


def _given(numbers: list[int] | UnsetType) -> tuple[int, ...]:
    return () if isinstance(numbers, UnsetType) else tuple(numbers)


# --- /controller, /controller_epoch --------------------------------------------------------------------------


class _ControllerJson(msgspec.Struct):
    version: int
    brokerid: Int32
    timestamp: str = "-1"


def encode_controller(broker_id: int, timestamp_ms: int) -> bytes:
    return msgspec.json.encode(_ControllerJson(version=1, brokerid=broker_id, timestamp=str(timestamp_ms)))


def decode_controller(data: bytes) -> int:
    """Return the broker id of the controller."""
    node: _ControllerJson = _decode(CONTROLLER, data, _ControllerJson)
    return node.brokerid


def encode_controller_epoch(epoch: int) -> bytes:
    return str(epoch).encode()


def decode_controller_epoch(data: bytes) -> int:
    epoch = number(data.decode("utf-8", "replace"), MAX_EPOCH)
    if epoch is None:
        raise MalformedZnode(
            f"the znode {CONTROLLER_EPOCH} holds {data[:40]!r}: a number of at most {MAX_EPOCH} is expected; correct it"
        )
    return epoch


# --- /cluster/id, notifications, /config/topics/T, /latest_producer_id_block ----------------------------------


class _ClusterJson(msgspec.Struct):
    version: str
    id: str


def encode_cluster_id(cluster_id: str) -> bytes:
    return msgspec.json.encode(_ClusterJson(version="1", id=cluster_id))


def decode_cluster_id(data: bytes) -> str:
    node: _ClusterJson = _decode(CLUSTER_ID, data, _ClusterJson)
    return node.id


class _PartitionJson(msgspec.Struct):
    topic: str
    partition: Int32


class _IsrChangeJson(msgspec.Struct):
    version: int
    partitions: list[_PartitionJson]


def encode_isr_change(partitions: Sequence[TopicPartition]) -> bytes:
    return msgspec.json.encode(
        _IsrChangeJson(version=1, partitions=[_PartitionJson(p.topic, p.partition) for p in partitions])
    )


def decode_isr_change(path: str, data: bytes) -> list[TopicPartition]:
    node: _IsrChangeJson = _decode(path, data, _IsrChangeJson, "")
    return [TopicPartition(p.topic, p.partition) for p in node.partitions]


LOG_DIR_FAILURE = 1
"""The only event of a log directory, as in Kafka."""


MOST_REASON = 500
"""Characters of the reason in the event of a log directory."""


class _LogDirEventJson(msgspec.Struct, omit_defaults=True):
    version: int
    broker: Int32
    event: int
    reason: str = ""
    """For the timeline; Kafka has none."""


def encode_log_dir_event(broker_id: int, reason: str = "") -> bytes:
    """Encode the event that a log directory of the broker has failed."""
    return msgspec.json.encode(
        _LogDirEventJson(version=1, broker=broker_id, event=LOG_DIR_FAILURE, reason=reason[:MOST_REASON])
    )


def decode_log_dir_event(path: str, data: bytes) -> tuple[int, str]:
    """Return the id of the broker, which knows more about the event, and the reason; empty: not known."""
    node: _LogDirEventJson = _decode(path, data, _LogDirEventJson, "")
    return node.broker, node.reason[:MOST_REASON]


class _PreferredElectionJson(msgspec.Struct):
    partitions: list[_PartitionJson]
    version: int = 1


def encode_preferred_election(partitions: Sequence[TopicPartition]) -> bytes:
    return msgspec.json.encode(
        _PreferredElectionJson(partitions=[_PartitionJson(p.topic, p.partition) for p in partitions])
    )


def decode_preferred_election(data: bytes) -> list[TopicPartition]:
    """Return the partitions in the znode; some may not exist or be listed twice."""
    node: _PreferredElectionJson = _decode(PREFERRED_REPLICA_ELECTION, data, _PreferredElectionJson, "")
    return [TopicPartition(p.topic, p.partition) for p in node.partitions]


class _ConfigJson(msgspec.Struct):
    version: int
    config: dict[str, str]


def encode_config(config: Mapping[str, str]) -> bytes:
    return msgspec.json.encode(_ConfigJson(version=1, config=dict(config)))


def decode_config(path: str, data: bytes) -> dict[str, str]:
    node: _ConfigJson = _decode(path, data, _ConfigJson)
    return node.config


class _ConfigChangeJson(msgspec.Struct):
    version: int
    entity_path: str


def encode_config_change(path: str) -> bytes:
    """Encode the event that the settings at this path, below `/config`, have changed."""
    return msgspec.json.encode(_ConfigChangeJson(version=2, entity_path=path.removeprefix(f"{CONFIG}/")))


def decode_config_change(path: str, data: bytes) -> str:
    """Return the path of the settings that have changed."""
    node: _ConfigChangeJson = _decode(path, data, _ConfigChangeJson, "")
    return f"{CONFIG}/{node.entity_path}"


class ProducerIdBlock(msgspec.Struct, frozen=True):
    """The ids `first` to `last`, both included, belong to a broker."""

    broker: int
    first: int
    last: int


class _ProducerIdBlockJson(msgspec.Struct):
    version: int
    broker: Int32
    block_start: str
    block_end: str


def encode_producer_id_block(block: ProducerIdBlock) -> bytes:
    return msgspec.json.encode(
        _ProducerIdBlockJson(version=1, broker=block.broker, block_start=str(block.first), block_end=str(block.last))
    )


def decode_producer_id_block(data: bytes) -> ProducerIdBlock | None:
    """Decode a block. None: no block has been allocated yet."""
    if not data:
        return None
    node: _ProducerIdBlockJson = _decode(PRODUCER_ID_BLOCK, data, _ProducerIdBlockJson)
    first, last = number(node.block_start, MAX_PRODUCER_ID), number(node.block_end, MAX_PRODUCER_ID)
    if first is None or last is None:
        raise MalformedZnode(
            f"the znode {PRODUCER_ID_BLOCK} holds {data[:120]!r}: numbers of at most {MAX_PRODUCER_ID} are expected; "
            "correct it"
        )
    return ProducerIdBlock(node.broker, first, last)


# --- /admin/reassign_partitions ----------------------------------------------------------------------------------


class _ReassignmentJson(msgspec.Struct):
    topic: str
    partition: Int32
    replicas: Replicas


class _ReassignmentsJson(msgspec.Struct):
    partitions: list[_ReassignmentJson]
    version: int = 1


class Reassignment(NamedTuple):
    """An entry of `/admin/reassign_partitions`: the new replicas of a partition."""

    partition: TopicPartition
    replicas: tuple[int, ...]


def encode_reassignments(reassignments: Sequence[Reassignment]) -> bytes:
    return msgspec.json.encode(
        {
            "version": 1,
            "partitions": [
                _ReassignmentJson(partition.topic, partition.partition, list(replicas))
                for partition, replicas in reassignments
            ],
        }
    )


def decode_reassignments(data: bytes) -> list[Reassignment]:
    """Decode the entries without checking them. Raises MalformedZnode."""
    node: _ReassignmentsJson = _decode(REASSIGN_PARTITIONS, data, _ReassignmentsJson, "")
    return [Reassignment(TopicPartition(r.topic, r.partition), tuple(r.replicas)) for r in node.partitions]
