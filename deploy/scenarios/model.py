"""A scenario as values, read from a file. Pure: `read_scenario` has no effects."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from minibroker.deploy.local.who import BrokerId, LeaderOf
from minibroker.deploy.scenarios.document import Document, Path, ScenarioError, Table, read_document
from minibroker.deploy.scenarios.words import (
    Action,
    Event,
    FollowerOf,
    Named,
    parse_action,
    parse_event,
    parse_partition,
    parse_time,
    runners_of,
)
from minibroker.protocol.model import TopicPartition, topic_name_problem

MOST_BROKERS = 9
MOST_RATE = 5_000
DEFAULT_WITHIN_S = 60.0


class Topic(NamedTuple):
    name: str
    partitions: int
    replicas: int
    configs: Mapping[str, str]


class Client(NamedTuple):
    """A program. It produces, consumes, or does both in transactions."""

    name: str
    line: int
    produces: str | None
    consumes: str | None
    group: str | None
    members: int
    rate: int
    """Records per second."""
    acks: str
    transactional_id: str | None
    transaction_records: int
    delivery_timeout_s: float
    read_committed: bool
    session_timeout_s: float
    starts_later: bool


class Step(NamedTuple):
    line: int
    at_s: float | None
    """Seconds since the clients are at work."""
    after_s: float | None
    """Seconds since the previous step was done."""
    when: Event | None
    within_s: float
    """How long the event is waited for."""
    actions: tuple[Action, ...]
    name: str | None
    """What the first member that the actions hit is called from now on."""


class Expect(NamedTuple):
    """What must hold. None and False: it is measured and not judged."""

    nothing_lost: bool
    nothing_doubled: bool
    everything_consumed: bool
    exactly_once: bool
    longest_stall_s: float | None
    longest_rebalance_s: float | None
    leaders_balanced: bool
    whole_within_s: float
    errors: tuple[str, ...]
    """Names of errors that clients must have seen."""
    lost: bool
    """Acknowledged records must be lost: the scenario shows how."""


class Scenario(NamedTuple):
    name: str
    about: str
    source: str
    """The file's text."""
    path: str
    brokers: int
    settings: Mapping[str, str]
    topics: tuple[Topic, ...]
    clients: tuple[Client, ...]
    steps: tuple[Step, ...]
    calm_s: float
    """How long the clients continue after the last step."""
    heals: bool
    """Whether faults are undone after the last step."""
    expect: Expect

    def check_runner(self, runner: str) -> None:
        """Raises ScenarioError for the first sentence that this runner does not know."""
        for step in self.steps:
            sentences: list[Action | Event] = [*step.actions, *([] if step.when is None else [step.when])]
            for sentence in sentences:
                known = runners_of(sentence)
                if runner not in known:
                    raise ScenarioError(
                        f'{self.path}:{step.line}: "{sentence.text}" cannot be done on {runner} processes: '
                        f"run it with --{known[0]}"
                    )


def read_scenario(text: str, path: str) -> Scenario:
    """Raises ScenarioError with the line, the value, the rule and the remedy."""
    document = read_document(text, path)
    whole = Table(document, (), document.content, "the scenario")
    whole.known("name", "about", "cluster", "topics", "clients", "steps", "end", "expect")
    whole.end()
    name = whole.text("name")
    about = " ".join(whole.text("about", " ").split())
    cluster = whole.table("cluster")
    brokers = cluster.number("brokers", 3, 1, MOST_BROKERS)
    settings = cluster.settings("settings")
    cluster.end()
    topics = tuple(_topic(table, brokers) for table in whole.tables("topics"))
    if not topics:
        raise document.error((), 'there are no topics: write [[topics]] and name = "orders"')
    clients = tuple(_client(table, [topic.name for topic in topics]) for table in whole.tables("clients"))
    _check_unique(document, "topics", [topic.name for topic in topics])
    _check_unique(document, "clients", [client.name for client in clients])
    steps = tuple(_step(table, clients) for table in whole.tables("steps"))
    _check_names(document, steps)
    _check_members(document, steps, brokers, topics)
    end = whole.table("end")
    calm_s = end.parsed("after", parse_time, "3 s")
    heals = end.truth("heal", True)
    end.end()
    expect = _expect(whole.table("expect"))
    whole.end()
    return Scenario(name, about, text, path, brokers, settings, topics, clients, steps, calm_s, heals, expect)


def _check_unique(document: Document, what: str, names: list[str]) -> None:
    for number, name in enumerate(names):
        if name in names[:number]:
            raise document.error((what, number, "name"), f'name = "{name}": another of the {what} has this name')


def _topic(table: Table, brokers: int) -> Topic:
    name = table.text("name")
    if problem := topic_name_problem(name):
        raise table.error("name", problem)
    made = Topic(
        name,
        table.number("partitions", 3, 1, 100),
        table.number("replicas", min(3, brokers), 1, brokers),
        table.settings("configs"),
    )
    table.end()
    return made


def _client(table: Table, topics: list[str]) -> Client:
    name = table.text("name")
    table.choice("dialect", "native", ["native"])
    made = Client(
        name=name,
        line=table.document.lines.get(table.path, 1),
        produces=_known_topic(table, "produces", topics),
        consumes=_known_topic(table, "consumes", topics),
        group=table.text("group") if table.has("group") else None,
        members=table.number("members", 1, 1, 20),
        rate=table.number("rate", 30, 1, MOST_RATE),
        acks=table.choice("acks", "all", ["all", "1", "0"]),
        transactional_id=table.text("transactional_id") if table.has("transactional_id") else None,
        transaction_records=table.number("transaction_records", 5, 1, 1_000),
        delivery_timeout_s=table.parsed("delivery_timeout", parse_time, "60 s"),
        read_committed=table.choice("isolation", "read_uncommitted", ["read_uncommitted", "read_committed"])
        == "read_committed",
        session_timeout_s=table.parsed("session_timeout", parse_time, "6 s"),
        starts_later=table.choice("starts", "first", ["first", "later"]) == "later",
    )
    table.known("group", "transactional_id")
    table.end()
    if made.produces is None and made.consumes is None:
        raise table.error("name", 'this client does nothing: give produces = "TOPIC" or consumes = "TOPIC"')
    if made.produces is not None and made.consumes is not None and (made.group is None or not made.transactional_id):
        raise table.error(
            "produces", "a client that consumes and produces does so in transactions: give group and transactional_id"
        )
    if made.members > 1 and (made.group is None or made.produces is not None):
        raise table.error("members", 'only members of a group that consume share a topic: give group = "NAME"')
    if made.transactional_id is not None and made.acks != "all":
        raise table.error("acks", 'transactions need acks = "all"')
    return made


def _known_topic(table: Table, name: str, topics: list[str]) -> str | None:
    table.known(name)
    if not table.has(name):
        return None
    topic = table.text(name)
    if topic not in topics:
        raise table.error(name, f"there is no such topic; give one of {', '.join(topics)}, or add it to [[topics]]")
    return topic


def _step(table: Table, clients: tuple[Client, ...]) -> Step:
    times = [name for name in ("at", "after", "when") if table.has(name)]
    table.known("at", "after", "when", "within", "as")
    if len(times) != 1:
        raise table.error(
            times[1] if times else "do", 'a step has one of at = "2 s", after = "500 ms" or when = "an event"'
        )
    if table.has("within") and not table.has("when"):
        raise table.error("within", "it limits the wait for an event: give when, or leave it out")
    actions = tuple(_parsed_action(table, text) for text in table.texts("do"))
    if not actions and not table.has("when"):
        raise table.error(times[0], 'this step does nothing: give do = "kill leader:orders-0"')
    for action in actions:
        client = action.words.get("client")
        if client is not None and client not in [known.name for known in clients]:
            raise table.error("do", f"there is no client {client}: add it to [[clients]]")
    step = Step(
        line=table.document.lines.get(table.path, 1),
        at_s=table.parsed("at", parse_time) if table.has("at") else None,
        after_s=table.parsed("after", parse_time) if table.has("after") else None,
        when=table.parsed("when", parse_event) if table.has("when") else None,
        within_s=table.parsed("within", parse_time, f"{DEFAULT_WITHIN_S:g} s"),
        actions=actions,
        name=table.text("as") if table.has("as") else None,
    )
    table.end()
    return step


def _parsed_action(table: Table, text: str) -> Action:
    try:
        return parse_action(text)
    except ValueError as error:
        raise table.error("do", f'"{text}": {error}' if len(table.texts("do")) > 1 else str(error)) from None


def _check_names(document: Document, steps: tuple[Step, ...]) -> None:
    names: set[str] = set()
    for number, step in enumerate(steps):
        for action in step.actions:
            for place in ("who", "other"):
                if (
                    place in action.words
                    and isinstance(target := action.who(place), Named)
                    and target.name not in names
                ):
                    raise document.error(
                        ("steps", number, "do"),
                        f'"{action.text}": {target.name} is no broker: give a broker id, controller, '
                        "leader:TOPIC-PARTITION, follower:TOPIC-PARTITION, coordinator:GROUP, transactions:ID, all, "
                        "zookeeper, or a name that an earlier step gave with as",
                    )
        if step.name is not None:
            names.add(step.name)


def _check_members(document: Document, steps: tuple[Step, ...], brokers: int, topics: tuple[Topic, ...]) -> None:
    """Raises ScenarioError for a broker or partition that the cluster does not have."""
    counts = {topic.name: topic.partitions for topic in topics}

    def check(path: Path, text: str, partition: TopicPartition) -> None:
        if partition.topic.startswith("__"):
            return
        if partition.partition >= counts.get(partition.topic, 0):
            known = ", ".join(f"{name}-0 to {name}-{count - 1}" for name, count in counts.items())
            raise document.error(path, f'"{text}": there is no partition {partition}; the partitions are {known}')

    for number, step in enumerate(steps):
        if step.when is not None and "partition" in step.when.words:
            check(("steps", number, "when"), step.when.text, step.when.partition)
        for action in step.actions:
            path = ("steps", number, "do")
            if "partition" in action.words:
                check(path, action.text, parse_partition(action.words["partition"]))
            for place in ("who", "other"):
                target = action.who(place) if place in action.words else None
                if isinstance(target, LeaderOf | FollowerOf):
                    check(path, action.text, target.partition)
                if isinstance(target, BrokerId) and not 1 <= target.id <= brokers:
                    raise document.error(
                        path, f'"{action.text}": there is no broker {target.id}; the brokers are 1 to {brokers}'
                    )


def _expect(table: Table) -> Expect:
    table.known("longest_stall", "longest_rebalance")
    expect = Expect(
        nothing_lost=table.truth("nothing_lost", True),
        nothing_doubled=table.truth("nothing_doubled", True),
        everything_consumed=table.truth("everything_consumed", True),
        exactly_once=table.truth("exactly_once", False),
        longest_stall_s=table.parsed("longest_stall", parse_time) if table.has("longest_stall") else None,
        longest_rebalance_s=table.parsed("longest_rebalance", parse_time) if table.has("longest_rebalance") else None,
        leaders_balanced=table.truth("leaders_balanced", False),
        whole_within_s=table.parsed("whole_within", parse_time, "60 s"),
        errors=tuple(table.texts("errors")),
        lost=table.truth("lost", False),
    )
    table.end()
    if expect.lost and expect.nothing_lost and table.has("nothing_lost"):
        raise table.error("lost", "nothing_lost = true contradicts it: leave one of the two out")
    return expect._replace(nothing_lost=expect.nothing_lost and not expect.lost)
