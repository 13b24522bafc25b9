"""Whether a broker is suspected to have crashed, by what came of the attempts to connect to it.

**Refused**, twice, means that the host is there and no process listens on the port: the process is gone, as surely as
anything can be known from outside, so it is suspected at once. So is a broker whose host name is gone, where a
connection stood before: that is how containers end. (Where none stood, the name may be misspelt.) Everything else (no
answer, no route, accepted and closed again, as a container's port proxy does) may be the network, so it must last for
`broker.crash.detection.ms`.

A broker that finds others unreachable may itself be cut off. So when ZooKeeper has been slow to answer, what was seen
until then counts for nothing (`forgotten`).

A suspicion is only that: it deletes a znode, which the suspect, if it lives, creates again under a new broker epoch.
A broker that comes back and still cannot be reached was perhaps never gone: one link is broken, or its advertised
address is wrong, and to remove it again and again would elect new leaders for as long as that lasts. So each suspicion
in a row makes the next one take four times as long, refused or not, until a connection stands; the session finds a real
crash meanwhile. A row outlives the suspect's broker epoch, which each suspicion changes, and terms of office: a link
between the controller and another broker is broken for both ends, they depose each other in turn, and would begin to
count anew each time. (Two brokers that have no third one to lead them had 40 controllers in two minutes that way, and
as many leader epochs. Now either end suspects the other after 0.5, 2, 8, 32 and 128 s.) A broker that was started anew
is connected to as soon as it has registered, and a crash of it is found as quickly as the first one.

Times are monotonic seconds.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

REFUSALS_NEEDED = 2
RETRY_PAUSE_S = 0.02

BACK_OFF = 4
"""Each suspicion in a row takes this many times as long as the one before."""
LONGEST_PATIENCE_S = 128.0
"""But no longer than this. (A broker that has died is gone from ZooKeeper sooner, when its session ends.)"""
MAX_IN_A_ROW = 10
"""More are not counted: they would change nothing."""
FORGOTTEN_S = 600.0
"""A row also ends when the broker was not suspected for this long: longer than any suspicion takes, by default."""


class Attempt(Enum):
    """What came of an attempt to connect."""

    REFUSED = "refused"
    NAME_IS_GONE = "the name is gone"
    NO_ANSWER = "no answer"
    CLOSED = "accepted, and closed again at once"
    STOOD = "a connection stood for a while, and has ended"


class UnreachableBroker(NamedTuple):
    """A broker that could not be reached when it was last tried."""

    epoch: int
    since_s: float
    seen_s: float
    has_stood: bool
    """A connection to it had stood for a while before."""
    is_suspected: bool = False


class Suspicion(NamedTuple):
    """The last suspicion of a broker to which no connection has stood since."""

    at_s: float
    in_a_row: int


class Watched(NamedTuple):
    """What the watch of one broker has seen so far."""

    failing_since_s: float | None = None
    """None: nothing that counts has failed."""
    refusals: int = 0
    """How many of the last attempts were refused in a row."""
    in_a_row: int = 0
    """Suspicions of this broker since a connection stood."""
    has_stood: bool = False
    """A connection has stood at some time."""

    def since_s(self, now_s: float) -> float:
        return now_s if self.failing_since_s is None else self.failing_since_s

    def forgotten(self) -> Watched:
        """What failed says nothing about the broker: it may have been this end that was cut off."""
        return self._replace(failing_since_s=None, refusals=0)


class CrashDecision(NamedTuple):
    watched: Watched
    is_suspect: bool
    pause_s: float
    """Until the next attempt, if the broker is not suspected."""


def in_a_row(last: Suspicion | None, now_s: float) -> int:
    """How many suspicions of a broker there have been since a connection to it stood, in whatever epoch of its own and
    of the controller's."""
    if last is None or now_s - last.at_s > FORGOTTEN_S:
        return 0
    return min(last.in_a_row, MAX_IN_A_ROW)


def remembered(
    trouble: UnreachableBroker | None, broker_epoch: int, now_s: float, detection_s: float
) -> UnreachableBroker | None:
    """What the last watch of this epoch saw, if that was just now: a broker that has removed a crashed controller, and
    then takes its office, need not find out again that it has crashed."""
    if trouble is None or trouble.epoch != broker_epoch:
        return None
    return trouble if now_s - trouble.seen_s < detection_s else None


def begin(trouble: UnreachableBroker | None, suspicions_in_a_row: int) -> Watched:
    """A watch that starts from what is remembered. What the broker was suspected for has been judged: another suspicion
    takes its full time."""
    if trouble is None:
        return Watched(in_a_row=suspicions_in_a_row)
    since_s = None if trouble.is_suspected else trouble.since_s
    return Watched(since_s, in_a_row=suspicions_in_a_row, has_stood=trouble.has_stood)


def connect_timeout_s(watched: Watched, now_s: float, detection_s: float) -> float:
    """How long to wait for an answer: until the decision is due."""
    due_s = watched.since_s(now_s) + _patience_s(watched, detection_s)
    return min(max(due_s - now_s, RETRY_PAUSE_S), detection_s)


def probe_timeout_s(trouble: UnreachableBroker | None, now_s: float, detection_s: float) -> float:
    """How long to wait for the answer of a broker that is probed, not watched."""
    return detection_s if trouble is None else max(trouble.since_s + detection_s - now_s, RETRY_PAUSE_S)


def decide(watched: Watched, attempt: Attempt, now_s: float, detection_s: float) -> CrashDecision:
    """What to make of an attempt that has just ended."""
    if attempt is Attempt.STOOD:
        watched = Watched(now_s, has_stood=True)
    else:
        is_refusal = attempt is Attempt.REFUSED or (attempt is Attempt.NAME_IS_GONE and watched.has_stood)
        refusals = watched.refusals + 1 if is_refusal else 0
        watched = watched._replace(failing_since_s=watched.since_s(now_s), refusals=refusals)
    is_refused = watched.refusals >= REFUSALS_NEEDED and watched.in_a_row == 0
    lasted_s = now_s - watched.since_s(now_s)
    return CrashDecision(
        watched,
        is_suspect=is_refused or lasted_s >= _patience_s(watched, detection_s),
        pause_s=min(RETRY_PAUSE_S * BACK_OFF**watched.in_a_row, detection_s / 2),
    )


def _patience_s(watched: Watched, detection_s: float) -> float:
    return float(min(detection_s * BACK_OFF**watched.in_a_row, max(detection_s, LONGEST_PATIENCE_S)))
