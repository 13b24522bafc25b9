"""The words of scenario files: times, who, actions and events. They are those of the command line where it has them.

`ACTIONS` and `EVENTS` are the whole language; docs/scenarios.md explains each of their rows, and a test compares.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from minibroker.deploy.local.who import MalformedWho, Who, parse_who
from minibroker.deploy.times import parse_time
from minibroker.protocol import apis
from minibroker.protocol.model import TopicPartition

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]*")


class Named(NamedTuple):
    """The broker that an earlier step has given this name."""

    name: str


class Bystander(NamedTuple):
    """The first broker that is not the controller."""


Target = Who | Named | Bystander


class Action(NamedTuple):
    """Something to do. `text` is how the file says it."""

    verb: str
    text: str
    words: Mapping[str, str]
    """The parts of the text, by the name of their place in the form."""

    def who(self, name: str = "who") -> Target:
        return parse_target(self.words[name])

    def seconds(self) -> float:
        return parse_time(self.words["time"])


class Event(NamedTuple):
    """Something to wait for."""

    kind: str
    text: str
    words: Mapping[str, str]

    @property
    def partition(self) -> TopicPartition:
        return parse_partition(self.words["partition"])


class Form(NamedTuple):
    """A form of a sentence. Words in capitals are places."""

    sentence: str
    meaning: str
    runners: tuple[str, ...] = ("virtual", "live", "containers")
    """The runners that can do it."""

    @property
    def verb(self) -> str:
        """The name of the form: its words without the places."""
        return " ".join(word for word in self.sentence.split() if word not in _PLACES)


_VIRTUAL = ("virtual",)
_INJECTED = ("virtual", "live")
"""Faults that brokers inject into themselves, which those in containers are not started for."""

ACTIONS = (
    Form("kill WHO", "SIGKILL. Written data survives."),
    Form("stop WHO", "SIGTERM. The broker hands its leaders over first."),
    Form("start WHO", "Start a broker that is gone. `start all` starts every broker that is gone."),
    Form("pause WHO", "SIGSTOP. Connections stay open, and nothing is answered."),
    Form("resume WHO", "SIGCONT."),
    Form("restart all in turn", "Stop and start each broker, and wait until its replicas are in sync."),
    Form("isolate WHO", "Cut a broker off from all others, from ZooKeeper and from clients."),
    Form("cut WHO from OTHER", "Drop packets between two brokers, or between a broker and zookeeper.", _INJECTED),
    Form("cut packets from WHO to OTHER", "Drop the packets that one broker sends to another one.", _INJECTED),
    Form(
        "drop connections of WHO",
        "Break all connections of a broker, except those to zookeeper, once.",
        _INJECTED,
    ),
    Form("heal", "End every isolate, cut, slow, fill and break, and set clocks right."),
    Form("power-cut WHO", "The host loses its power, and data that was not synced.", _VIRTUAL),
    Form("expire WHO", "End the broker's ZooKeeper session.", _VIRTUAL),
    Form(
        "slow network by TIME",
        "Each packet takes this long; live, each packet that a broker sends.",
        _INJECTED,
    ),
    Form("slow disk of WHO by TIME", "Each fdatasync takes this long.", _INJECTED),
    Form("fill disk of WHO", "No file of the broker can grow.", _INJECTED),
    Form("break disk of WHO", "Each call of the log directory fails with EIO.", _INJECTED),
    Form("mend disk of WHO", "Undo slow, fill and break. Start the broker if it has ended.", _INJECTED),
    Form("move clock of WHO by TIME", "Its wall clock jumps forward.", _INJECTED),
    Form("set TOPIC SETTING", "Change a setting of a topic, as NAME=VALUE."),
    Form("elect PARTITION unclean", "Elect a leader without in-sync replicas. Records may be lost."),
    Form("elect preferred", "Let the first replica of each partition lead, if it is in sync."),
    Form(
        "move WHO to another broker", "Another broker in sync coordinates. WHO is coordinator:GROUP or transactions:ID."
    ),
    Form("reassign PARTITION to BROKERS", "Move a partition, as in 2,3,1."),
    Form("start client CLIENT", 'Start a client that has starts = "later", or one that was killed.'),
    Form("kill client CLIENT", "The client's process ends without goodbye."),
)

EVENTS = (
    Form("PARTITION has COUNT in its ISR", "Exactly so many replicas are in sync."),
    Form("PARTITION has a new leader", "A broker leads that did not lead before the last fault."),
    Form("PARTITION has no leader", "The last leader is gone, and no replica may take over."),
    Form("PARTITION has a leader", "Some broker leads."),
    Form("there is a new controller", "A broker is the controller that was not before the last fault."),
    Form("there is no controller", "The znode /controller is gone."),
    Form("COUNT records are acknowledged", "So many more than when the previous step was done."),
    Form("COUNT records are refused", "So many sends have failed for good since the previous step was done."),
    Form("all replicas are in sync", "Every broker lives, and every replica is in its ISR."),
    Form("the controller is about to send LeaderAndIsr", "A new leader is in ZooKeeper; no broker knows.", _VIRTUAL),
    Form("REQUEST is about to arrive", "The bytes of such a request are at its broker's door.", _VIRTUAL),
)

_PLACES = {
    "WHO": r"(?P<who>[^\s]+)",
    "OTHER": r"(?P<other>[^\s]+)",
    "TIME": r"(?P<time>\d+(?:\.\d+)? ?(?:ms|s|min))",
    "TOPIC": r"(?P<topic>[A-Za-z0-9._-]+)",
    "SETTING": r"(?P<setting>[a-z.]+=[^\s]*)",
    "PARTITION": r"(?P<partition>[A-Za-z0-9._-]+-\d+)",
    "BROKERS": r"(?P<brokers>\d+(?:,\d+)*)",
    "CLIENT": r"(?P<client>[A-Za-z0-9._-]+)",
    "COUNT": r"(?P<count>\d+)",
    "REQUEST": r"(?P<request>[A-Za-z]+)",
}

FAULTS = frozenset(
    {"kill", "stop", "pause", "restart all in turn", "isolate", "cut from", "power-cut", "expire", "slow disk of by"}
    | {"fill disk of", "break disk of", "slow network by", "cut packets from to", "drop connections of"}
    | {"move to another broker"}
)
"""The verbs after which a leader or controller counts as new."""

REQUESTS = {api.name: api.key for api in apis.APIS.values()}


def _pattern(form: Form) -> re.Pattern[str]:
    return re.compile(r"\s+".join(_PLACES.get(word, re.escape(word)) for word in form.sentence.split()))


_ACTION_PATTERNS = [(form, _pattern(form)) for form in ACTIONS]
_EVENT_PATTERNS = [(form, _pattern(form)) for form in EVENTS]


def parse_duration(text: str) -> float:
    """Return seconds, more than none. Raises ValueError with the rule."""
    value_s = parse_time(text)
    if not value_s:
        raise ValueError('give a time longer than 0, as in "10 s"')
    return value_s


def parse_partition(text: str) -> TopicPartition:
    topic, dash, number = text.rpartition("-")
    if not (dash and topic and number.isdecimal()):
        raise ValueError(f"{text!r} is no partition: write TOPIC-NUMBER, as in orders-0")
    return TopicPartition(topic, int(number))


def parse_target(text: str) -> Target:
    """Raises ValueError with the rule."""
    if text == "bystander":
        return Bystander()
    try:
        return parse_who(text)
    except MalformedWho as error:
        if _NAME.fullmatch(text):
            return Named(text)
        raise ValueError(f"{error}; or bystander, or a name that an earlier step gave with as") from None


def parse_action(text: str) -> Action:
    """Raises ValueError with the rule."""
    for form, pattern in _ACTION_PATTERNS:
        if matched := pattern.fullmatch(text.strip()):
            action = Action(form.verb, text.strip(), matched.groupdict())
            for place in ("who", "other"):
                if place in action.words:
                    action.who(place)
            return action
    raise ValueError(_unknown(text, "an action", ACTIONS))


def parse_event(text: str) -> Event:
    """Raises ValueError with the rule."""
    for form, pattern in _EVENT_PATTERNS:
        if matched := pattern.fullmatch(text.strip()):
            event = Event(form.verb, text.strip(), matched.groupdict())
            request = event.words.get("request")
            if request is not None and request not in REQUESTS:
                raise ValueError(f"there is no request {request}: give one of {', '.join(sorted(REQUESTS))}")
            return event
    raise ValueError(_unknown(text, "an event", EVENTS))


def runners_of(sentence: Action | Event) -> tuple[str, ...]:
    """Return the runners that know it."""
    if isinstance(sentence, Action):
        return next(form.runners for form in ACTIONS if form.verb == sentence.verb)
    return next(form.runners for form in EVENTS if form.verb == sentence.kind)


def _unknown(text: str, what: str, forms: tuple[Form, ...]) -> str:
    topic = _topic_instead_of_partition(text, forms)
    if topic is not None:
        return f"{topic} is no partition: write TOPIC-NUMBER, as in {topic}-0"
    first = text.split()[0] if text.split() else ""
    close = [form.sentence for form in forms if first and first in form.sentence.split()]
    return f"this is not {what}; write {' | '.join(close or [form.sentence for form in forms])}"


def _topic_instead_of_partition(text: str, forms: tuple[Form, ...]) -> str | None:
    """Return the word that would be a partition if it had a number, if all other words are right."""
    words = text.split()
    for place, word in enumerate(words):
        mended = " ".join([*words[:place], f"{word}-0", *words[place + 1 :]])
        for form in forms:
            matched = _pattern(form).fullmatch(mended)
            if matched and matched.groupdict().get("partition") == f"{word}-0":
                return word
    return None
