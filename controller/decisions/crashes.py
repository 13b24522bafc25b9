"""The rules for suspecting that a broker has crashed, by the outcomes of attempts to connect to it.

Two **refused** attempts mean that the host is up and no process listens on the port. The process is gone, so the broker
is suspected at once, a few milliseconds after the connection was lost. If it lives after all, it registers again, which
costs less than patience with each crash. The same holds if its host name has vanished after a connection stood: that is
how containers end. (Without an earlier connection the name may be misspelt.) All other failures (no answer, no route,
accepted and closed again, as by a container's port proxy) may be due to the network, so they must last for
`broker.crash.detection.ms`.

A broker that finds others unreachable may itself be cut off. So if ZooKeeper was slow to answer, earlier failures do
not count (`forgotten`).

A suspicion deletes a znode. A live suspect creates it again, under a new broker epoch. If such a broker still cannot be
reached, perhaps one link is broken or its advertised address is wrong, and repeated removals would elect new leaders as
long as that lasts. So each suspicion in a row takes four times as long as the one before, refused or not, until a
connection stands; meanwhile the session detects a real crash. A row outlasts the suspect's broker epoch, which each
suspicion changes, and terms of office: if the link between the controller and another broker is broken, the two depose
each other in turn, and would begin to count again each time. (Two brokers without a third one had 40 controllers, and
as many leader epochs, in two minutes. Now either end suspects the other after 0.5, 2, 8, 32 and 128 s.) A restarted
broker is connected to as soon as it has registered, so its next crash is detected as quickly as the first.

Times are monotonic seconds.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

REFUSALS_NEEDED = 2
RETRY_PAUSE_S = 0.02
REFUSED_PAUSE_S = 0.005
"""The pause after a refusal, which takes no time itself. A crashing process may still listen when its first sockets
close."""

BACK_OFF = 4
"""The factor by which each suspicion in a row takes longer than the one before."""
LONGEST_PATIENCE_S = 128.0
"""The longest time to a suspicion. (If the broker is dead, its session ends sooner.)"""
MAX_IN_A_ROW = 10
"""The highest count of suspicions; higher counts would change nothing."""
FORGOTTEN_S = 600.0
"""Seconds without a suspicion after which a row ends; longer than any suspicion takes by default."""


class ConnectOutcome(Enum):
    """The outcome of an attempt to connect."""

    REFUSED = "refused"
    NAME_IS_GONE = "the name is gone"
    NO_ANSWER = "no answer"
    CLOSED = "accepted, and closed again at once"
    STOOD = "a connection stood for a while, and has ended"


class UnreachableBroker(NamedTuple):
    """A broker that the last attempt could not reach."""

    epoch: int
    since_s: float
    seen_s: float
    has_stood: bool
    """A connection to it has stood before."""
    is_suspected: bool = False
    lost_s: float | None = None
    """When the connection to it was lost. None: none has stood."""

    def facts(self) -> dict[str, object]:
        """Return facts for the timeline: the milliseconds for which it has been unreachable (`lasted_ms`), and those
        before, since the connection was lost, in which ZooKeeper was slow or away so that no attempt counted."""
        waited_ms = 0.0 if self.lost_s is None else round((self.since_s - self.lost_s) * 1_000, 3)
        facts: dict[str, object] = {"lasted_ms": round((self.seen_s - self.since_s) * 1_000, 3)}
        return facts | {"waited_ms": waited_ms} if waited_ms else facts


class Suspicion(NamedTuple):
    """The last suspicion of a broker, until a connection to it stands."""

    at_s: float
    in_a_row: int


class Watched(NamedTuple):
    """The observations of one broker's watch."""

    failing_since_s: float | None = None
    """None: no failure counts."""
    refusals: int = 0
    """The number of consecutive refusals up to the last attempt."""
    in_a_row: int = 0
    """Suspicions of this broker since a connection stood."""
    has_stood: bool = False
    """A connection has stood before."""
    lost_s: float | None = None
    """When the last connection was lost. Unlike the failures, it is not forgotten."""

    def since_s(self, now_s: float) -> float:
        return now_s if self.failing_since_s is None else self.failing_since_s

    def forgotten(self) -> Watched:
        """Return this without the failures, since this end may have been cut off."""
        return self._replace(failing_since_s=None, refusals=0)


class CrashDecision(NamedTuple):
    watched: Watched
    is_suspect: bool
    pause_s: float
    """Seconds until the next attempt, if the broker is not suspected."""


def in_a_row(last: Suspicion | None, now_s: float) -> int:
    """Return the number of suspicions since a connection to the broker stood, over all broker and controller epochs."""
    if last is None or now_s - last.at_s > FORGOTTEN_S:
        return 0
    return min(last.in_a_row, MAX_IN_A_ROW)


def remembered(
    trouble: UnreachableBroker | None, broker_epoch: int, now_s: float, detection_s: float
) -> UnreachableBroker | None:
    """Return the recent trouble of the broker in this epoch. With it, a broker that has removed a crashed controller
    and then takes office need not detect the crash again."""
    if trouble is None or trouble.epoch != broker_epoch:
        return None
    return trouble if now_s - trouble.seen_s < detection_s else None


def begin(trouble: UnreachableBroker | None, suspicions_in_a_row: int) -> Watched:
    """Begin a watch with the remembered trouble. If that led to a suspicion, the next one takes its full time."""
    if trouble is None:
        return Watched(in_a_row=suspicions_in_a_row)
    if trouble.is_suspected:
        return Watched(in_a_row=suspicions_in_a_row, has_stood=trouble.has_stood)
    return Watched(trouble.since_s, 0, suspicions_in_a_row, trouble.has_stood, trouble.lost_s)


def connect_timeout_s(watched: Watched, now_s: float, detection_s: float) -> float:
    """Return how long an attempt may take: until the decision is due at most, and as long as all attempts before it
    together. TCP repeats a lost request for a connection only after a second; a new attempt sends another one."""
    since_s = watched.since_s(now_s)
    left_s = since_s + _patience_s(watched, detection_s) - now_s
    longest_s = max(detection_s / 10, now_s - since_s)
    return min(max(min(left_s, longest_s), RETRY_PAUSE_S), detection_s)


def probe_timeout_s(trouble: UnreachableBroker | None, now_s: float, detection_s: float) -> float:
    """Return how long the probe of a broker may take."""
    return detection_s if trouble is None else max(trouble.since_s + detection_s - now_s, RETRY_PAUSE_S)


def decide(watched: Watched, attempt: ConnectOutcome, now_s: float, detection_s: float) -> CrashDecision:
    """Judge an attempt that has just ended."""
    if attempt is ConnectOutcome.STOOD:
        watched = Watched(now_s, has_stood=True, lost_s=now_s)
        return CrashDecision(watched, is_suspect=False, pause_s=0.0)
    is_refusal = attempt is ConnectOutcome.REFUSED or (attempt is ConnectOutcome.NAME_IS_GONE and watched.has_stood)
    refusals = watched.refusals + 1 if is_refusal else 0
    watched = watched._replace(failing_since_s=watched.since_s(now_s), refusals=refusals)
    is_refused = watched.refusals >= REFUSALS_NEEDED and watched.in_a_row == 0
    lasted_s = now_s - watched.since_s(now_s)
    is_quick = attempt is ConnectOutcome.REFUSED and watched.in_a_row == 0
    pause_s = REFUSED_PAUSE_S if is_quick else RETRY_PAUSE_S
    return CrashDecision(
        watched,
        is_suspect=is_refused or lasted_s >= _patience_s(watched, detection_s),
        pause_s=min(pause_s * BACK_OFF**watched.in_a_row, detection_s / 2),
    )


def _patience_s(watched: Watched, detection_s: float) -> float:
    return float(min(detection_s * BACK_OFF**watched.in_a_row, max(detection_s, LONGEST_PATIENCE_S)))
