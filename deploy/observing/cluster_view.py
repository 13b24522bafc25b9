"""The state of a cluster, merged from the metadata of every broker that answers.

Brokers may disagree for a moment, and a broker that was paused may still believe in a controller that was replaced long
ago. All are therefore asked: the answer with the newest controller epoch decides which brokers live and which topics
exist, and each partition has the state with the newest leader epoch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from types import MappingProxyType
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from minibroker.client.administering.movements import Movement, Sizes, movement
from minibroker.client.administering.reassignment import PartitionReassignment
from minibroker.client.cluster.coordinators import KeyType
from minibroker.deploy.observing.access import ANYBODY, Access, Address
from minibroker.protocol.apis import (
    DESCRIBE_CONFIGS,
    DESCRIBE_GROUPS,
    DESCRIBE_LOG_DIRS,
    DESCRIBE_TRANSACTIONS,
    FIND_COORDINATOR,
    LIST_GROUPS,
    LIST_OFFSETS,
    LIST_PARTITION_REASSIGNMENTS,
    LIST_TRANSACTIONS,
    METADATA,
    Api,
)
from minibroker.protocol.connections.rpc import RequestTimedOut
from minibroker.protocol.errors import ErrorCode, MinibrokerError, error_of
from minibroker.protocol.messages import (
    LATEST_TIMESTAMP,
    MAX_TOPICS,
    DescribableLogDirTopic,
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeHealthResponse,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
    ListPartitionReassignmentsRequest,
    Message,
    MetadataPartition,
    MetadataRequest,
    MetadataResponse,
)
from minibroker.protocol.messages.groups import DescribeGroupsRequest, FindCoordinatorRequest, ListGroupsRequest
from minibroker.protocol.messages.transactions import DescribeTransactionsRequest, ListTransactionsRequest
from minibroker.protocol.model import NO_CONTROLLER, NO_EPOCH, NO_LEADER, ResourceType, TopicPartition

ASK_TIMEOUT_S = 2.0
SLOW_AFTER_S = 1.0
"""`minibroker status` and the console call a broker slow if it takes longer than this to answer a request."""
ASK_END_OFFSETS_TIMEOUT_S = 0.5
MIN_INSYNC_REPLICAS = "min.insync.replicas"
DEAD = "Dead"
"""The state in which a group is described that does not exist."""

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)


class ClusterView(NamedTuple):
    """The brokers' answers, merged. If no broker answers, it is empty and `is_unknown`."""

    brokers: dict[int, Address]
    """The registered brokers, by id."""
    controller_id: int | None
    controller_epoch: int | None
    partitions: dict[TopicPartition, MetadataPartition]
    answered: frozenset[Address] = frozenset()
    """The addresses at which a broker answered."""
    answer_s: Mapping[Address, float] = MappingProxyType({})
    """Seconds that each answer took, without those for opening the connection."""
    failures: Mapping[Address, MinibrokerError] = MappingProxyType({})
    """Why the brokers at the other addresses did not answer, if `examine` has asked them: RequestTimedOut if the
    connection was accepted."""
    uninformed: frozenset[Address] = frozenset()
    """The addresses of answering brokers that have not heard from a controller since their start. Other brokers may
    still report the run before: a registration outlives the process for seconds."""
    min_insync_replicas: Mapping[str, int] = MappingProxyType({})
    """The setting of each topic that has replicas out of sync, if a broker reported it."""
    movements: tuple[Movement, ...] = ()
    """Partitions whose replicas are being moved, if the controller reported them."""
    access: Access = ANYBODY
    """How the brokers were asked, and may be asked more."""
    stalls: Mapping[TopicPartition, Sequence[int]] = MappingProxyType({})
    """Partitions whose records wait to be committed for seconds, and the members of the ISR for which they wait."""
    doubted_stalls: Set[TopicPartition] = frozenset()
    """Those of `stalls` that wait for one of these members at least, and no leader says for which."""
    health: Mapping[int, DescribeHealthResponse] = MappingProxyType({})
    """What brokers have told of themselves, by id."""
    unregistered: Mapping[int, Address] = MappingProxyType({})
    """Brokers that answered although they are not registered."""
    missing_rights: tuple[str, ...] = ()
    """Those without which the brokers do not show everything, see `rights`."""
    hidden_topics: tuple[str, ...] = ()
    """Names of topics, and prefixes with a star, that DENY entries hide from the client."""

    @property
    def is_unknown(self) -> bool:
        """Whether no broker answered that has heard from a controller."""
        return not self.brokers

    def without(self, dead: Collection[int]) -> ClusterView:
        """Return the view without these dead brokers as leaders, controller and in-sync replicas.

        The living brokers learn of the deaths later, or never if there is no ZooKeeper.
        """
        return self._replace(
            controller_id=None if self.controller_id in dead else self.controller_id,
            partitions={
                name: replace(
                    state,
                    leader_id=NO_LEADER if state.leader_id in dead else state.leader_id,
                    isr_nodes=[broker for broker in state.isr_nodes if broker not in dead],
                )
                for name, state in self.partitions.items()
            },
        )

    def offline_partitions(self) -> list[TopicPartition]:
        return [name for name, state in self.partitions.items() if state.leader_id == NO_LEADER]

    def led_by(self, broker_id: int) -> list[TopicPartition]:
        return [name for name, state in self.partitions.items() if state.leader_id == broker_id]

    def waiting_for(self, broker_id: int) -> list[TopicPartition]:
        """Return the partitions that others lead with this broker in the ISR: acks=all waits for it."""
        return [
            name
            for name, state in self.partitions.items()
            if broker_id in state.isr_nodes and state.leader_id not in (broker_id, NO_LEADER)
        ]

    def id_at(self, address: Address) -> int | None:
        """Return the registered broker with this address."""
        return next((broker_id for broker_id, known in self.brokers.items() if known == address), None)

    def silent(self) -> list[int]:
        """Return the registered brokers that did not answer."""
        return [broker_id for broker_id, address in self.brokers.items() if address not in self.answered]

    def hanging(self) -> list[Address]:
        """Return the addresses at which connections are accepted and requests are not answered."""
        return [address for address, error in self.failures.items() if isinstance(error, RequestTimedOut)]

    def missing(self) -> list[int]:
        """Return the brokers that have replicas and are neither registered nor answer."""
        with_replicas = {broker for state in self.partitions.values() for broker in state.replica_nodes}
        return sorted(with_replicas - self.brokers.keys() - self.unregistered.keys())

    def slow(self) -> dict[int, float]:
        """Return the registered brokers that were slow to answer, with the seconds that the answer took."""
        taken = {broker_id: self.answer_s.get(address, 0.0) for broker_id, address in self.brokers.items()}
        return {broker_id: seconds for broker_id, seconds in taken.items() if seconds > SLOW_AFTER_S}

    def missing_from_isr(self, partitions: Iterable[TopicPartition]) -> set[int]:
        """Return the brokers whose replicas of these partitions are out of sync, without those that `movements` add."""
        adding = {one.name: {copy.broker for copy in one.copies} for one in self.movements}
        return {
            broker
            for name in partitions
            for broker in self.partitions[name].replica_nodes
            if broker not in self.partitions[name].isr_nodes and broker not in adding.get(name, ())
        }

    def under_replicated_partitions(self) -> list[TopicPartition]:
        """Return the partitions with fewer replicas in sync than assigned. As in the metric, replicas that `movements`
        add do not count as assigned."""
        adding = {one.name: len(one.copies) for one in self.movements}
        return [
            name
            for name, state in self.partitions.items()
            if len(state.isr_nodes) < len(state.replica_nodes) - adding.get(name, 0)
        ]

    def not_preferred_partitions(self) -> list[TopicPartition]:
        """Return the partitions that another broker leads although the first replica is in sync."""
        return [
            name
            for name, state in self.partitions.items()
            if state.replica_nodes
            and state.leader_id not in (NO_LEADER, state.replica_nodes[0])
            and state.replica_nodes[0] in state.isr_nodes
        ]

    def under_min_isr_partitions(self) -> list[TopicPartition]:
        """Return the partitions with fewer replicas in sync than the known `min.insync.replicas`."""
        return [
            name
            for name, state in self.partitions.items()
            if len(state.isr_nodes) < min(self.min_insync_replicas.get(name.topic, 0), len(state.replica_nodes))
        ]

    def at_min_isr_partitions(self) -> list[TopicPartition]:
        """Return the partitions that lack replicas in sync and have just the known `min.insync.replicas`."""
        return [
            name
            for name in self.under_replicated_partitions()
            if len(self.partitions[name].isr_nodes) == self.min_insync_replicas.get(name.topic)
        ]


def merge(answers: Sequence[MetadataResponse]) -> ClusterView:
    """Return the newest state in the answers. Between equally new ones the first wins: a change of the ISR raises no
    epoch, and a broker that is cut off from the controller does not learn of it."""
    newest = max(answers, key=lambda answer: (_is_informed(answer), answer.controller_epoch), default=None)
    if newest is None:
        return ClusterView({}, None, None, {})
    states = {
        TopicPartition(topic.name, state.partition_index): state
        for topic in newest.topics
        for state in topic.partitions
    }
    for answer in answers:
        for topic in answer.topics:
            for state in topic.partitions:
                name = TopicPartition(topic.name, state.partition_index)
                if name in states and state.leader_epoch > states[name].leader_epoch:
                    states[name] = state
    return ClusterView(
        brokers={broker.node_id: (broker.host, broker.port) for broker in newest.brokers},
        controller_id=None if newest.controller_id == NO_CONTROLLER else newest.controller_id,
        controller_epoch=None if newest.controller_epoch < 0 else newest.controller_epoch,
        partitions=dict(sorted(states.items())),
    )


def controller_first(answers: Mapping[Address, MetadataResponse]) -> list[MetadataResponse]:
    """Return the answers, that of the controller before the others."""
    view = merge(list(answers.values()))
    controller = None if view.controller_id is None else view.brokers.get(view.controller_id)
    return [answers[address] for address in sorted(answers, key=lambda address: address != controller)]


async def ask_cluster(
    addresses: Sequence[Address],
    timeout_s: float = ASK_TIMEOUT_S,
    without: Collection[Address] = (),
    access: Access = ANYBODY,
) -> ClusterView:
    """Ask all the addresses at once, and then the further ones that the answers name, except `without`. Brokers that do
    not answer are left out. The controller's answer wins over equally new ones."""
    timed = await _ask_metadata(access, addresses, timeout_s)
    named = merge([answer for answer, _ in timed.values()]).brokers.values()
    timed |= await _ask_metadata(access, sorted({*named} - {*addresses} - {*without}), timeout_s)
    return view_of(timed, access)


def view_of(timed: Mapping[Address, tuple[MetadataResponse, float]], access: Access) -> ClusterView:
    """Return the view of these answers, each with the seconds that it took. The controller's wins over equally new
    ones."""
    answers = {address: answer for address, (answer, _) in timed.items()}
    return merge(controller_first(answers))._replace(
        answered=frozenset(answers),
        answer_s={address: seconds for address, (_, seconds) in timed.items()},
        uninformed=frozenset(address for address, answer in answers.items() if not _is_informed(answer)),
        access=access,
    )


async def _ask_metadata(
    access: Access, addresses: Sequence[Address], timeout_s: float
) -> dict[Address, tuple[MetadataResponse, float]]:
    """Return the answers, with the seconds that each took."""
    results = await asyncio.gather(
        *(_ask_timed(access, address, METADATA, MetadataRequest(None), timeout_s) for address in addresses)
    )
    return {address: result for address, result in zip(addresses, results, strict=True) if result is not None}


def _is_informed(answer: MetadataResponse) -> bool:
    """A broker answers without brokers until the controller has sent it the whole metadata."""
    return bool(answer.brokers)


async def have_coordinators(
    addresses: Sequence[Address], timeout_s: float = ASK_TIMEOUT_S, access: Access = ANYBODY
) -> bool:
    """Ask every broker whether groups have coordinators, since they hear of a new topic one after the other. If the
    offsets topic is missing, the first creates it."""
    request = FindCoordinatorRequest(KeyType.GROUP.value, ["minibroker"])
    for address in addresses:
        answer = await ask(access, address, FIND_COORDINATOR, request, timeout_s)
        if answer is None or any(found.error_code != ErrorCode.NONE for found in answer.coordinators):
            return False
    return True


async def ask_min_insync_replicas(view: ClusterView, timeout_s: float) -> dict[str, int]:
    """Ask any broker for this setting of the topics that have replicas out of sync."""
    topics = sorted({name.topic for name in view.under_replicated_partitions()})[:MAX_TOPICS]
    address = min(view.answered, default=None)
    if not topics or address is None:
        return {}
    resources = [DescribeConfigsResource(ResourceType.TOPIC, topic, [MIN_INSYNC_REPLICAS]) for topic in topics]
    answer = await ask(view.access, address, DESCRIBE_CONFIGS, DescribeConfigsRequest(resources), timeout_s)
    return {
        result.resource_name: int(entry.value)
        for result in (() if answer is None else answer.results)
        for entry in result.configs
        if entry.name == MIN_INSYNC_REPLICAS and entry.value
    }


async def ask_movements(view: ClusterView, timeout_s: float) -> tuple[Movement, ...]:
    """Ask the controller which replicas are being moved, and the brokers how far they are."""
    address = None if view.controller_id is None else view.brokers.get(view.controller_id)
    if address not in view.answered:  # do not wait for a controller that hangs
        return ()
    request = ListPartitionReassignmentsRequest(int(timeout_s * 1_000))
    answer = await ask(view.access, address, LIST_PARTITION_REASSIGNMENTS, request, timeout_s)
    reassigned = {
        TopicPartition(topic.name, one.partition_index): PartitionReassignment(
            tuple(one.replicas), tuple(one.adding_replicas), tuple(one.removing_replicas)
        )
        for topic in (() if answer is None else answer.topics)
        for one in topic.partitions
        if TopicPartition(topic.name, one.partition_index) in view.partitions
    }
    if not reassigned:
        return ()
    leaders = {name: view.partitions[name].leader_id for name in reassigned}
    involved = {*leaders.values(), *(broker for one in reassigned.values() for broker in one.adding_replicas)}
    sizes = await ask_sizes(view, sorted(involved), reassigned, timeout_s)
    return tuple(movement(name, one, leaders[name], sizes) for name, one in sorted(reassigned.items()))


async def ask_sizes(
    view: ClusterView, brokers: Iterable[int], partitions: Iterable[TopicPartition], timeout_s: float
) -> Sizes:
    """Return the sizes of the partitions' replicas. Brokers that do not answer are left out."""
    topics: dict[str, DescribableLogDirTopic] = {}
    for name in partitions:
        topics.setdefault(name.topic, DescribableLogDirTopic(name.topic, [])).partitions.append(name.partition)
    # A broker that did not answer just now would be waited for.
    ids = [broker for broker in brokers if view.brokers.get(broker) in view.answered]
    answers = await _ask_all(view, DESCRIBE_LOG_DIRS, DescribeLogDirsRequest(list(topics.values())), timeout_s, ids)
    return {
        broker: {
            TopicPartition(topic.name, replica.partition_index): replica.partition_size
            for directory in answer.results
            for topic in directory.topics
            for replica in topic.partitions
            if not replica.is_future_key
        }
        for broker, answer in answers.items()
    }


async def ask_end_offsets(view: ClusterView, timeout_s: float = ASK_END_OFFSETS_TIMEOUT_S) -> dict[TopicPartition, int]:
    """Ask the leaders how far consumers can read. Partitions whose leader does not answer are left out."""
    led: dict[int, dict[str, ListOffsetsTopic]] = {}
    for name, state in view.partitions.items():
        if view.brokers.get(state.leader_id) in view.answered:
            topics = led.setdefault(state.leader_id, {})
            asked = ListOffsetsPartition(name.partition, NO_EPOCH, LATEST_TIMESTAMP)
            topics.setdefault(name.topic, ListOffsetsTopic(name.topic, [])).partitions.append(asked)
    answers = await asyncio.gather(
        *(
            ask(
                view.access,
                view.brokers[broker],
                LIST_OFFSETS,
                ListOffsetsRequest(-1, 0, list(topics.values())),
                timeout_s,
            )
            for broker, topics in led.items()
        )
    )
    return {
        TopicPartition(topic.name, partition.partition_index): partition.offset
        for answer in answers
        if answer is not None
        for topic in answer.topics
        for partition in topic.partitions
        if partition.error_code == ErrorCode.NONE
    }


async def has_group(view: ClusterView, coordinator: int, group: str, timeout_s: float = ASK_TIMEOUT_S) -> bool | None:
    """Ask the coordinator whether there is such a group. None: it does not answer, or does not know yet."""
    answer = await ask(
        view.access, view.brokers[coordinator], DESCRIBE_GROUPS, DescribeGroupsRequest([group]), timeout_s
    )
    found = None if answer is None else answer.groups[0]
    return None if found is None or found.error_code != ErrorCode.NONE else found.group_state != DEAD


async def has_transactional_id(
    view: ClusterView, coordinator: int, transactional_id: str, timeout_s: float = ASK_TIMEOUT_S
) -> bool | None:
    """As `has_group`, for the transactional id of a producer."""
    request = DescribeTransactionsRequest([transactional_id])
    answer = await ask(view.access, view.brokers[coordinator], DESCRIBE_TRANSACTIONS, request, timeout_s)
    if answer is None:
        return None
    exists = {ErrorCode.NONE: True, ErrorCode.TRANSACTIONAL_ID_NOT_FOUND: False}
    return exists.get(error_of(answer.transaction_states[0].error_code))


async def ask_groups(view: ClusterView, timeout_s: float = ASK_TIMEOUT_S) -> list[str]:
    """Return the groups of all brokers that answer."""
    answers = await _ask_all(view, LIST_GROUPS, ListGroupsRequest(), timeout_s)
    return sorted({group.group_id for answer in answers.values() for group in answer.groups})


async def ask_transactional_ids(view: ClusterView, timeout_s: float = ASK_TIMEOUT_S) -> list[str]:
    """Return the transactional ids that all brokers that answer coordinate."""
    answers = await _ask_all(view, LIST_TRANSACTIONS, ListTransactionsRequest(), timeout_s)
    return sorted({known.transactional_id for answer in answers.values() for known in answer.transaction_states})


async def ask_offline_log_dirs(view: ClusterView, timeout_s: float = ASK_TIMEOUT_S) -> dict[int, dict[str, str]]:
    """Return, by broker, the offline log directories and the reasons. Brokers that do not answer are left out,
    and those that did not just now are not waited for."""
    ids = [broker for broker, address in sorted(view.brokers.items()) if address in view.answered]
    answers = await _ask_all(view, DESCRIBE_LOG_DIRS, DescribeLogDirsRequest([]), timeout_s, ids)
    return {broker: offline_log_dirs(answer) for broker, answer in answers.items()}


def offline_log_dirs(answer: DescribeLogDirsResponse) -> dict[str, str]:
    """Return the offline log directories, and the reasons."""
    return {found.log_dir: found.error_message for found in answer.results if found.error_code != ErrorCode.NONE}


async def _ask_all(
    view: ClusterView,
    api: Api[Request, Response],
    request: Request,
    timeout_s: float,
    brokers: Sequence[int] | None = None,
) -> dict[int, Response]:
    """Return the answers of these brokers, or of all, by broker. Brokers that do not answer are left out."""
    ids = sorted(view.brokers) if brokers is None else brokers
    answers = await asyncio.gather(*(ask(view.access, view.brokers[id], api, request, timeout_s) for id in ids))
    return {id: answer for id, answer in zip(ids, answers, strict=True) if answer is not None}


async def ask(
    access: Access, address: Address, api: Api[Request, Response], request: Request, timeout_s: float
) -> Response | None:
    """Return the answer of the broker at that address; None if there is none in time."""
    found = await _ask_timed(access, address, api, request, timeout_s)
    return None if found is None else found[0]


async def _ask_timed(
    access: Access, address: Address, api: Api[Request, Response], request: Request, timeout_s: float
) -> tuple[Response, float] | None:
    """As `ask`, with the seconds that the answer took. Opening the connection does not count: clients keep theirs."""
    clock = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(timeout_s):
            connection = await access.open(address, timeout_s)
            try:
                asked_s = clock()
                return await connection.request(api, request, timeout_s=timeout_s), clock() - asked_s
            finally:
                connection.close()
                await connection.wait_closed()
    except (TimeoutError, MinibrokerError):
        return None
