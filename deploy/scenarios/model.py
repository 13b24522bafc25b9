"""A scenario as values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from minibroker.deploy.scenarios.document import ScenarioError, lines_of
from minibroker.deploy.scenarios.words import Action, Event, runners_of

SETTINGS = {
    "offsets.topic.num.partitions": "1",
    "transaction.state.log.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
}
"""Settings of every cluster, unless the file has others: few internal partitions, and groups that form at once."""

MOST_CONTAINERS = 3
"""The brokers of deploy/docker-compose.yml."""
_CANNOT_BE_DONE = {
    "virtual": "cannot be done on virtual time",
    "live": "cannot be done on live processes",
    "containers": "cannot be done on containers, which can be killed, stopped, started, paused and isolated",
}


class Topic(NamedTuple):
    name: str
    partitions: int
    replicas: int
    configs: Mapping[str, str]


class Client(NamedTuple):
    """A program. It produces, consumes, or does both in transactions."""

    name: str
    line: int
    dialect: str
    """"native" or "kafka": the protocol that it speaks."""
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

    @property
    def is_undisturbed(self) -> bool:
        """Whether no step does anything."""
        return not any(step.actions for step in self.steps)

    def partitions_of(self, client: Client) -> int:
        """Return the number of partitions of the topic that the client produces, or else consumes."""
        name = client.produces or client.consumes
        return next(topic.partitions for topic in self.topics if topic.name == name)

    def check_runner(self, runner: str) -> None:
        """Raises ScenarioError for the first sentence that this runner does not know."""
        if runner == "containers" and self.brokers > MOST_CONTAINERS:
            line = lines_of(self.source).get(("cluster", "brokers"), 1)
            raise ScenarioError(
                f"{self.path}:{line}: brokers = {self.brokers}: docker-compose.yml has {MOST_CONTAINERS} brokers: give "
                f"{MOST_CONTAINERS} or fewer, or run it with --virtual or --live"
            )
        for step in self.steps:
            sentences: list[Action | Event] = [*step.actions, *([] if step.when is None else [step.when])]
            for sentence in sentences:
                known = runners_of(sentence)
                if runner not in known:
                    raise ScenarioError(
                        f'{self.path}:{step.line}: "{sentence.text}" {_CANNOT_BE_DONE[runner]}: '
                        f"run it with {' or '.join(f'--{name}' for name in known)}"
                    )
