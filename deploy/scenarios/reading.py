"""Reads a scenario from a file. Pure."""

from __future__ import annotations

from minibroker.deploy.scenarios import coherence
from minibroker.deploy.scenarios.document import Document, Table, read_document
from minibroker.deploy.scenarios.model import Client, Expect, Scenario, Step, Topic
from minibroker.deploy.scenarios.words import Action, parse_action, parse_duration, parse_event
from minibroker.deploy.times import parse_time
from minibroker.protocol.model import topic_name_problem

MOST_BROKERS = 9
MOST_RATE = 5_000
DEFAULT_WITHIN_S = 60.0

_NEEDS = {
    "rate": "produces",
    "acks": "produces",
    "delivery_timeout": "produces",
    "transactional_id": "produces",
    "group": "consumes",
    "isolation": "consumes",
    "session_timeout": "group",
    "transaction_records": "transactional_id",
}
"""Settings of a client that mean nothing without another one."""


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
    settings = cluster.settings("settings", coherence.check_broker_settings)
    cluster.end()
    topics = tuple(_topic(table, brokers) for table in whole.tables("topics"))
    if not topics:
        raise document.error((), 'there are no topics: write [[topics]] and name = "orders"')
    clients = tuple(_client(table, [topic.name for topic in topics]) for table in whole.tables("clients"))
    _check_unique(document, "topics", [topic.name for topic in topics])
    _check_unique(document, "clients", [client.name for client in clients])
    steps = tuple(_step(table) for table in whole.tables("steps"))
    end = whole.table("end")
    calm_s = end.parsed("after", parse_time, "3 s")
    heals = end.truth("heal", True)
    end.end()
    expect = _expect(whole.table("expect"))
    whole.end()
    scenario = Scenario(name, about, text, path, brokers, settings, topics, clients, steps, calm_s, heals, expect)
    coherence.check(document, scenario)
    return scenario


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
        table.settings("configs", coherence.check_topic_settings),
    )
    table.end()
    return made


def _client(table: Table, topics: list[str]) -> Client:
    name = table.text("name")
    made = Client(
        name=name,
        line=table.document.lines.get(table.path, 1),
        dialect=table.choice("dialect", "native", ["native", "kafka"]),
        produces=_known_topic(table, "produces", topics),
        consumes=_known_topic(table, "consumes", topics),
        group=table.text("group") if table.has("group") else None,
        members=table.number("members", 1, 1, 20),
        rate=table.number("rate", 30, 1, MOST_RATE),
        acks=table.choice("acks", "all", ["all", "1", "0"]),
        transactional_id=table.text("transactional_id") if table.has("transactional_id") else None,
        transaction_records=table.number("transaction_records", 5, 1, 1_000),
        delivery_timeout_s=table.parsed("delivery_timeout", parse_duration, "60 s"),
        read_committed=table.choice("isolation", "read_uncommitted", ["read_uncommitted", "read_committed"])
        == "read_committed",
        session_timeout_s=table.parsed("session_timeout", parse_duration, "6 s"),
        starts_later=table.choice("starts", "first", ["first", "later"]) == "later",
    )
    table.known("group", "transactional_id")
    table.end()
    if made.dialect == "kafka":
        _check_kafka(table, made)
    if made.produces is None and made.consumes is None:
        raise table.error("name", 'this client does nothing: give produces = "TOPIC" or consumes = "TOPIC"')
    for setting, needed in _NEEDS.items():
        if table.has(setting) and not table.has(needed):
            raise table.error(setting, f'it means nothing without {needed}: give {needed} = "..." too, or leave it out')
    if made.produces is not None and made.consumes is not None and (made.group is None or not made.transactional_id):
        raise table.error(
            "produces", "a client that consumes and produces does so in transactions: give group and transactional_id"
        )
    if made.members > 1 and (made.group is None or made.produces is not None):
        raise table.error("members", 'only members of a group that consume share a topic: give group = "NAME"')
    if made.transactional_id is not None and made.acks != "all":
        raise table.error("acks", 'transactions need acks = "all"')
    return made


def _check_kafka(table: Table, client: Client) -> None:
    """Raises ScenarioError for a client of Kafka's protocol that does more than the simulator's can."""
    rule = "a client of Kafka's protocol sends without transactions, or reads without a group"
    for name in ("group", "transactional_id"):
        if table.has(name):
            raise table.error(name, f'{rule}: leave {name} out, or give dialect = "native"')
    if client.acks == "0":
        raise table.error("acks", f'{rule}, and its records are acknowledged: give acks = "all" or "1"')
    if client.produces is not None and client.consumes is not None:
        raise table.error("consumes", f"{rule}: write two clients, one that produces and one that consumes")


def _known_topic(table: Table, name: str, topics: list[str]) -> str | None:
    table.known(name)
    if not table.has(name):
        return None
    topic = table.text(name)
    if topic not in topics:
        raise table.error(name, f"there is no such topic; give one of {', '.join(topics)}, or add it to [[topics]]")
    return topic


def _step(table: Table) -> Step:
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
    step = Step(
        line=table.document.lines.get(table.path, 1),
        at_s=table.parsed("at", parse_time) if table.has("at") else None,
        after_s=table.parsed("after", parse_time) if table.has("after") else None,
        when=table.parsed("when", parse_event) if table.has("when") else None,
        within_s=table.parsed("within", parse_duration, f"{DEFAULT_WITHIN_S:g} s"),
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


def _expect(table: Table) -> Expect:
    table.known("longest_stall", "longest_rebalance")
    expect = Expect(
        nothing_lost=table.truth("nothing_lost", True),
        nothing_doubled=table.truth("nothing_doubled", True),
        everything_consumed=table.truth("everything_consumed", True),
        exactly_once=table.truth("exactly_once", False),
        longest_stall_s=table.parsed("longest_stall", parse_duration) if table.has("longest_stall") else None,
        longest_rebalance_s=table.parsed("longest_rebalance", parse_duration)
        if table.has("longest_rebalance")
        else None,
        leaders_balanced=table.truth("leaders_balanced", False),
        whole_within_s=table.parsed("whole_within", parse_duration, "60 s"),
        errors=tuple(table.texts("errors")),
        lost=table.truth("lost", False),
    )
    table.end()
    if expect.lost and expect.nothing_lost and table.has("nothing_lost"):
        raise table.error("lost", "nothing_lost = true contradicts it: leave one of the two out")
    return expect._replace(nothing_lost=expect.nothing_lost and not expect.lost)
