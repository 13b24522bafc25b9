"""Whether the parts of a scenario fit together, before anything runs: names, ids, settings and errors that it mentions
must exist, and each sentence must be possible. Pure.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import NamedTuple

from minibroker.broker.settings.parsing import broker_config, topic_config
from minibroker.client import errors as client_errors
from minibroker.deploy.local.broker_process import OWN_SETTINGS
from minibroker.deploy.local.who import (
    AllBrokers,
    BrokerId,
    Coordinated,
    CoordinatorOf,
    Elected,
    FollowerOf,
    LeaderOf,
    TransactionsOf,
    ZooKeeperServer,
)
from minibroker.deploy.scenarios.document import Document, Path, ScenarioError, meant
from minibroker.deploy.scenarios.model import SETTINGS, Scenario, Step
from minibroker.deploy.scenarios.words import (
    Action,
    Bystander,
    Event,
    Named,
    Target,
    parse_partition,
    parse_target,
)
from minibroker.protocol import errors as protocol_errors
from minibroker.protocol.connections import rpc
from minibroker.protocol.errors import ErrorCode, MinibrokerError
from minibroker.protocol.model import OFFSETS_TOPIC, TRANSACTIONS_TOPIC, TopicPartition

_REQUIRED = {"broker.id": "1", "log.dirs": "/data", "zookeeper.connect": "localhost:2181"}
_OF_ZOOKEEPER = ("kill", "stop", "start", "pause", "resume")
"""Actions that ZooKeeper can suffer; it can also be cut from a broker."""
_ROUNDING_S = 1e-6
_INTERNAL = {
    OFFSETS_TOPIC: "offsets.topic.num.partitions",
    TRANSACTIONS_TOPIC: "transaction.state.log.num.partitions",
}
"""The setting with the number of partitions of each internal topic."""


def check_broker_settings(settings: Mapping[str, str]) -> None:
    """Raises ValueError with the rule."""
    for name in settings:
        if name in OWN_SETTINGS:
            raise ValueError(f"broker setting {name} is set by the runner: leave it out")
    broker_config({**_REQUIRED, **settings})


def check_topic_settings(settings: Mapping[str, str]) -> None:
    """Raises ValueError with the rule."""
    topic_config(settings)


def check(document: Document, scenario: Scenario) -> None:
    """Raises ScenarioError with the line of the part that does not fit."""
    world = _World(document, scenario)
    for number, step in enumerate(scenario.steps):
        world.check_step(number, step)
    world.check_promises()


class _Place(NamedTuple):
    """A sentence, and where it stands."""

    path: Path
    text: str


class _World:
    """What the steps so far can refer to."""

    def __init__(self, document: Document, scenario: Scenario) -> None:
        self._document = document
        self._scenario = scenario
        self._clients = {client.name for client in scenario.clients}
        self._running = {client.name for client in scenario.clients if not client.starts_later}
        self._started = set(self._running)
        """Clients that run at some time."""
        self._earliest_s = 0.0
        """The steps so far take at least so long."""
        self._names: set[str] = set()
        """Names that steps have given with `as`."""
        self._topics = {topic.name: topic for topic in scenario.topics}
        settings = {**SETTINGS, **scenario.settings}
        self._partitions = {topic.name: topic.partitions for topic in scenario.topics}
        self._partitions |= {topic: int(settings[name]) for topic, name in _INTERNAL.items()}
        self._most_replicas = {topic.name: topic.replicas for topic in scenario.topics}

    # -- steps --

    def check_step(self, number: int, step: Step) -> None:
        self._check_time(number, step)
        if step.when is not None:
            self._check_event(_Place(("steps", number, "when"), step.when.text), step.when)
        for action in step.actions:
            self._check_action(_Place(("steps", number, "do"), action.text), action)
        if step.name is not None:
            self._check_name(("steps", number, "as"), step, step.name)
            self._names.add(step.name)

    def _check_time(self, number: int, step: Step) -> None:
        at_s = step.at_s
        if at_s is not None and at_s < self._earliest_s - _ROUNDING_S:
            given = self._document.content["steps"][number]["at"]
            rule = f"steps run in their order, and those before it take {self._earliest_s:g} s or longer"
            remedy = "give a later time, or move this step up"
            raise self._document.error(("steps", number, "at"), f'at = "{given}": {rule}: {remedy}')
        self._earliest_s = at_s if at_s is not None else self._earliest_s + (step.after_s or 0.0)

    def _check_name(self, path: Path, step: Step, name: str) -> None:
        shown = f'as = "{name}"'
        if not any("who" in action.words for action in step.actions):
            raise self._document.error(
                path, f"{shown}: this step hits no member that could have the name: leave it out"
            )
        try:
            is_free = isinstance(parse_target(name), Named)
        except ValueError:
            is_free = False
        if not is_free:
            rule = "a name begins with a letter, has letters, digits, - and _, and is no word of WHO, such as all"
            raise self._document.error(path, f"{shown}: {rule}")

    def _check_event(self, place: _Place, event: Event) -> None:
        if "partition" in event.words:
            self._check_partition(place, event.partition)
            count = int(event.words.get("count", "0"))
            most = self._most_replicas.get(event.partition.topic, self._scenario.brokers)
            if count > most:
                raise self._error(place, f"{event.partition} has {most} replicas, so that its ISR has at most {most}")
        elif "count" in event.words and not any(client.produces for client in self._scenario.clients):
            raise self._error(place, 'no client sends records: give one of [[clients]] produces = "TOPIC"')

    def _check_action(self, place: _Place, action: Action) -> None:
        words = action.words
        targets = [action.who(name) for name in ("who", "other") if name in words]
        for target in targets:
            self._check_target(place, target)
            if isinstance(target, ZooKeeperServer) and action.verb not in (*_OF_ZOOKEEPER, "cut from"):
                possible = ", ".join(_OF_ZOOKEEPER)
                raise self._error(place, f"ZooKeeper knows only {possible} and cut: give a broker")
        if action.verb == "start" and isinstance(targets[0], Elected):
            raise self._error(
                place,
                "a leader, follower, coordinator or controller is running already: give a broker id, all, zookeeper or "
                "a name",
            )
        if action.verb == "move to another broker" and not isinstance(targets[0], Coordinated):
            rule = "only coordinators move: give coordinator:GROUP or transactions:ID"
            raise self._error(place, f"{rule}; reassign and elect preferred move other leaders")
        if "other" in action.words:
            self._check_cut(place, words["who"], words["other"], targets)
        if "client" in words:
            self._check_client(place, action.verb, words["client"])
        if "topic" in words:
            self._check_setting(place, words["topic"], words["setting"])
        if "partition" in words:
            self._check_partition(place, parse_partition(words["partition"]))
        if "brokers" in words:
            self._check_reassignment(place, parse_partition(words["partition"]), words["brokers"])

    def _check_target(self, place: _Place, target: Target) -> None:
        scenario = self._scenario
        match target:
            case Named(name) if name not in self._names:
                raise self._error(
                    place,
                    f"{name} is no broker: give a broker id, controller, leader:TOPIC-PARTITION, "
                    "follower:TOPIC-PARTITION, coordinator:GROUP, transactions:ID, bystander, all, zookeeper, or a "
                    "name that an earlier step gave with as",
                )
            case BrokerId(id):
                self._check_broker(place, id)
            case LeaderOf(partition):
                self._check_partition(place, partition)
            case FollowerOf(partition):
                self._check_partition(place, partition)
                if self._most_replicas.get(partition.topic, scenario.brokers) < 2:
                    raise self._error(place, f"{partition} has one replica, so it has no follower")
            case Bystander() if scenario.brokers < 2:
                raise self._error(place, "there is one broker, which is the controller: give the cluster more brokers")
            case CoordinatorOf(group):
                known = {client.group for client in scenario.clients if client.group is not None}
                self._check_known(place, "group", group, known, "group")
            case TransactionsOf(id):
                ids = {client.transactional_id for client in scenario.clients if client.transactional_id is not None}
                self._check_known(place, "transactional id", id, ids, "transactional_id")

    def _check_known(self, place: _Place, noun: str, name: str, known: set[str], setting: str) -> None:
        if name not in known:
            there = f"the clients have {', '.join(sorted(known))}" if known else f'give a client {setting} = "{name}"'
            raise self._error(place, f"no client has the {noun} {name}; {there}")

    def _check_cut(self, place: _Place, one: str, other: str, targets: list[Target]) -> None:
        if one == other:
            raise self._error(place, f"{one} cannot be cut from itself: give two members")
        if any(isinstance(target, AllBrokers) for target in targets):
            raise self._error(place, "all cannot be cut at once: give two members, or write isolate all")

    def _check_client(self, place: _Place, verb: str, client: str) -> None:
        if client not in self._clients:
            raise self._error(
                place, f"there is no client {client}{meant(client, self._clients)}: add it to [[clients]]"
            )
        is_running = client in self._running
        if verb == "start client" and is_running:
            raise self._error(place, f'{client} is running already: give it starts = "later", or kill it before')
        if verb == "kill client" and not is_running:
            raise self._error(place, f"{client} is not running at this step: start it before, or leave this out")
        self._running ^= {client}
        self._started |= self._running

    def _check_setting(self, place: _Place, topic: str, setting: str) -> None:
        if topic not in self._partitions:
            raise self._error(place, f"there is no topic {topic}{meant(topic, self._topics)}: {self._known_topics()}")
        name, _, value = setting.partition("=")
        try:
            check_topic_settings({name: value})
        except ValueError as error:
            raise self._error(place, str(error)) from None

    def _check_reassignment(self, place: _Place, partition: TopicPartition, brokers: str) -> None:
        ids = [int(broker) for broker in brokers.split(",")]
        for broker_id in ids:
            self._check_broker(place, broker_id)
            if ids.count(broker_id) > 1:
                raise self._error(place, f"broker {broker_id} has one replica of a partition at most: name it once")
        most = self._most_replicas.get(partition.topic, self._scenario.brokers)
        self._most_replicas[partition.topic] = max(most, len(ids))

    def _check_broker(self, place: _Place, broker_id: int) -> None:
        if not 1 <= broker_id <= self._scenario.brokers:
            raise self._error(place, f"there is no broker {broker_id}; the brokers are 1 to {self._scenario.brokers}")

    def _check_partition(self, place: _Place, partition: TopicPartition) -> None:
        if partition.partition >= self._partitions.get(partition.topic, 0):
            known = ", ".join(
                f"{topic.name}-0 to {topic.name}-{topic.partitions - 1}" for topic in self._scenario.topics
            )
            raise self._error(place, f"there is no partition {partition}; the partitions are {known}")

    def _known_topics(self) -> str:
        return f"the topics are {', '.join(self._topics)}"

    def _error(self, place: _Place, message: str) -> ScenarioError:
        return self._document.error(place.path, f'"{place.text}": {message}')

    # -- promises --

    def check_promises(self) -> None:
        expect, clients = self._scenario.expect, self._scenario.clients
        if not any(client.produces for client in clients):
            who = "no client sends records" if clients else "there are no clients"
            example = f'produces = "{self._scenario.topics[0].name}"'
            remedy = (
                f"give one of [[clients]] {example}" if clients else f'write [[clients]], name = "shop" and {example}'
            )
            raise self._document.error(("clients",), f"{who}, so that no promise could be broken: {remedy}")
        for number, client in enumerate(clients):
            if client.name not in self._started:
                rule = f'no step starts {client.name}: give do = "start client {client.name}", or leave starts out'
                raise self._document.error(("clients", number, "starts"), f'starts = "later": {rule}')
        if expect.everything_consumed and not any(client.consumes for client in clients):
            path = ("expect", "everything_consumed")
            if path in self._document.lines:
                rule = 'no client reads records: give one of [[clients]] consumes = "TOPIC"'
                raise self._document.error(path, f"everything_consumed = true: {rule}")
        if expect.exactly_once and not any(client.produces and client.consumes for client in clients):
            rule = "no client processes records: give one of [[clients]] both consumes and produces"
            raise self._document.error(("expect", "exactly_once"), f"exactly_once = true: {rule}")
        if expect.longest_rebalance_s is not None and not any(client.group for client in clients):
            rule = 'no client is in a group: give one of [[clients]] group = "NAME"'
            raise self._document.error(("expect", "longest_rebalance"), f"longest_rebalance: {rule}")
        known = error_names()
        for name in expect.errors:
            if name not in known:
                hint = meant(name, known) or "; give a name of Kafka, as NOT_ENOUGH_REPLICAS, or a class of minibroker"
                raise self._document.error(("expect", "errors"), f'errors = ["{name}"]: there is no such error{hint}')


def error_names() -> set[str]:
    """Return the names of the errors that clients can see: Kafka's, and those of our classes."""
    classes = {
        name
        for module in (client_errors, protocol_errors, rpc)
        for name, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, MinibrokerError)
    }
    return {*ErrorCode.__members__, *classes}
