"""When the ZooKeeper session of a broker that does not answer will end. Pure.

The problem: a broker that hangs keeps its registration until its session ends, and nothing tells the viewer how long
that will take. ZooKeeper does not say it either: its server counts, and shows sessions to nobody.

The choice: the console measures when a broker last answered, and when it first did not. From the latter and from the
broker's `zookeeper.session.timeout.ms` it derives when the session will have ended, if the broker has sent no heartbeat
since. The page says which is which. A session can end up to a third of the timeout earlier, since heartbeats are that
far apart, and up to one tick of ZooKeeper later.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

REST_S = 10.0
"""After this long without a question, what was known before says nothing of now."""


class Session(NamedTuple):
    """What the console knows of a broker's session at the time of a reading."""

    answered_ago_s: float | None
    """Since the broker's last answer. None: it has not answered since it registered, or since the console rested."""
    unanswered_for_s: float | None
    """Since the first question that it has not answered since then. None: it answers."""
    timeout_s: float | None
    """None: unknown."""
    answered_at_ms: int | None
    """Milliseconds since 1970."""

    @property
    def ends_in_s(self) -> float | None:
        """Negative: it should have ended. None: nothing indicates its end, or the timeout is unknown."""
        if self.unanswered_for_s is None or self.timeout_s is None:
            return None
        return self.timeout_s - self.unanswered_for_s


class Contacts:
    """When brokers have answered. Times are of one monotonic clock."""

    def __init__(self) -> None:
        self._asked_s = float("-inf")
        self._answered_s: dict[int, float] = {}
        self._answered_at_ms: dict[int, int] = {}
        """The last answers of all brokers, by the wall clock."""
        self._unanswered_s: dict[int, float] = {}
        self._timeouts_s: dict[int, float | None] = {}
        self._answering: frozenset[int] = frozenset()

    @property
    def silent(self) -> tuple[int, ...]:
        """The registered brokers that do not answer, while others do. Empty if no broker answers."""
        return tuple(sorted(self._unanswered_s)) if self._answering else ()

    def lost(self) -> None:
        """No broker has answered."""
        self._answering = frozenset()

    def asked(self, answers: Mapping[int, bool], asked_s: float, now_s: float, wall_ms: int) -> None:
        """Record which of the registered brokers have answered a question. A broker that is registered no more may
        come back with another timeout, and is not asked until then."""
        if asked_s - self._asked_s > REST_S:
            self._answered_s.clear()
            self._unanswered_s.clear()
        self._asked_s = max(self._asked_s, asked_s)
        for broker, has_answered in answers.items():
            if has_answered:
                self._answered_s[broker] = now_s
                self._answered_at_ms[broker] = wall_ms
                self._unanswered_s.pop(broker, None)
            elif self._answered_s.get(broker, asked_s) <= asked_s:  # otherwise a later question was answered
                self._unanswered_s.setdefault(broker, asked_s)
        self._answering = frozenset(broker for broker, has_answered in answers.items() if has_answered)
        for known in (self._answered_s, self._unanswered_s, self._timeouts_s):
            for broker in known.keys() - answers.keys():
                del known[broker]

    def learn(self, broker: int, timeout_s: float | None) -> None:
        """None: the broker refuses to tell."""
        self._timeouts_s[broker] = timeout_s

    def unknown(self, brokers: Iterable[int]) -> list[int]:
        """Return those that have not been asked for their timeout."""
        return [broker for broker in brokers if broker not in self._timeouts_s]

    def session(self, broker: int, now_s: float) -> Session:
        """A broker whose timeout is unknown gets the longest of the others, which are usually the same."""
        answered_s = self._answered_s.get(broker)
        unanswered_s = self._unanswered_s.get(broker)
        own_s = self._timeouts_s.get(broker)
        others_s = (timeout_s for timeout_s in self._timeouts_s.values() if timeout_s is not None)
        return Session(
            None if answered_s is None else now_s - answered_s,
            None if unanswered_s is None else now_s - unanswered_s,
            max(others_s, default=None) if own_s is None else own_s,
            self._answered_at_ms.get(broker),
        )
