"""Tells the story of a failover from its entries: what was lost, and how every partition got a leader again. Pure.

It begins with the first sign (a lost connection, a resignation, the last that another broker heard from one that
hangs), continues with the change of controller or the loss of a broker, the elections that follow and their writes, and
ends when the last resulting order was answered. Times are relative to the beginning, by the clocks of the machines
that recorded them (`Clock.observed_ms`): an injected move of a broker's clock does not move its entries. Rejected:
guessing each broker's offset from entries of others, since a step that only one broker records has no other time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from minibroker.client.administering.timeline import Entry
from minibroker.client.cli.timelines.story import Step, Story
from minibroker.client.cli.timelines.turns import (
    BY_OTHERS,
    CLOCKS_DIFFER_MS,
    CONTROLLER_STOPS,
    INTERRUPTIONS,
    SESSION_ENDED,
    SIGNS_WITHIN_MS,
    SILENT,
    STOPS,
    TOGETHER_MS,
    began_ms,
    came_back,
    controller_before,
    ended_together,
    is_election,
    is_news,
    longest_away_ms,
    stalls_over,
    started_before,
    victims_of,
)
from minibroker.client.cli.timelines.words import (
    cut,
    failed_disks,
    has_full_disk,
    is_internal,
    milliseconds,
    not_running,
    orders,
    sentence,
    state_lines,
)
from minibroker.protocol.model import NO_LEADER
from minibroker.protocol.words import all_of, counted

_BACK_WITHIN_MS = SIGNS_WITHIN_MS
"""A broker that registers again this soon, and was neither unreachable nor silent, had only lost its session."""
_LATE_MS = 100
"""A busy controller hears an answer this much later than its recorded times add up to."""

_SIGNS = (*BY_OTHERS, "BrokerSuspected", "Resignation")
_ANSWERS = ("LeaderAndIsrAnswered", "StopReplicaAnswered", "UpdateMetadataAnswered")
_SESSION_TIMEOUT = "`zookeeper.session.timeout.ms` (6 s by default)"


class _Outage(NamedTuple):
    """A time of a partition without a leader."""

    since_ms: float
    written_ms: float | None
    """When the next leader was in ZooKeeper. None: there is none yet."""
    confirmed_ms: float | None
    """When it had confirmed that it leads. None: not recorded."""

    def length_ms(self, is_confirmed: bool) -> float | None:
        until_ms = self.confirmed_ms if is_confirmed else self.written_ms
        return None if until_ms is None else until_ms - self.since_ms


class Teller:
    def __init__(
        self, entries: Sequence[Entry], turns: Sequence[int], victims: set[int], previous: int, whole: Entry
    ) -> None:
        """`previous`: the index of the last turn of the failover before. `whole`: the first turn, with all topics."""
        self._entries = entries
        self._previous = previous
        self._last_turn = turns[-1]
        self._indexes = turns
        self._turns = [entries[index] for index in turns]
        self._victims = victims
        signs = dict(self._find_signs(turns[0]))
        self._signs = list(signs.values())
        self._stopped = {turn["broker"] for turn in self._turns if turn["event"] == STOPS} | {
            sign["controller"]
            for sign in self._signs
            if sign["event"] == "Resignation" and sign["cause"] == CONTROLLER_STOPS
        }
        disks = dict(self._find_failed_disks(turns[0]))
        self._disks = list(disks.values())
        silences = dict(self._find_silences())
        self._silences = list(silences.values())
        ended = {entry["controller"]: entry for entry in self._find_ended_sessions()}
        """The last entry of each of these brokers."""
        self._without_zookeeper = ended_together(list(ended.values()))
        """The ended sessions that show that ZooKeeper itself was away."""
        shared = {entry["controller"] for entry in self._without_zookeeper}
        self._ended = {b: entry for b, entry in ended.items() if b in shared or self._is_victim(b)}
        self._stalls = dict(self._find_stalls())
        self.first = min([turns[0], *signs, *silences, *disks])
        """The index of the story's first entry."""
        self._answers = list(self._find_answers(turns[0]))
        """Pairs of a turn's index and an answer to its orders."""
        self._first_started = self._turns[0] if self._no_broker_ran(self._turns[0], whole) else None
        """The first turn, if no broker ran before: then no partition had a leader."""
        self._back = set() if self._first_started else self._only_registered_again(turns[0])
        self._noticed_late = any(sign["event"] == "Resignation" and is_news(sign) for sign in self._signs)
        is_stop = self._turns[0]["event"] == STOPS
        self._noticed_ms = min(map(began_ms, self._turns[:1] if is_stop else [*self._signs, self._turns[0]]))
        self._began_ms = min([self._noticed_ms, *map(began_ms, (*self._beginnings(), *self._disks))])
        self._losses = list(self._find_losses())

    def story(self) -> Story:
        steps = [self._step(sign, 0.0, sentence(sign), tuple(cut(sign.get("writes", [])))) for sign in self._signs]
        steps += [self._step(each, began_ms(each) - each["time_ms"], sentence(each)) for each in self._silences]
        steps += self._ended_sessions()
        for stall in self._stalls.values():
            text = f"Broker {stall['controller']} stops answering: {not_running(stall)}."
            steps.append(self._step(stall, began_ms(stall) - stall["time_ms"], text))
        for disk in self._disks:
            steps += [
                Step(self._at(disk, 0.0), disk["controller"], disk["epoch"], "LogDirFailure", text)
                for text in failed_disks(disk)
            ]
        lost = next((sign for sign in self._signs if "lasted_ms" in sign and began_ms(sign) == self._noticed_ms), None)
        if lost is not None:
            text = f"The connection of broker {lost['controller']} to broker {lost['broker']} is lost."
            steps.insert(0, self._step(lost, began_ms(lost) - lost["time_ms"], text))
        waited = max(self._signs, key=lambda sign: float(sign.get("waited_ms", 0.0)), default={})
        if "waited_ms" in waited:
            text = (
                f"ZooKeeper answers broker {waited['controller']} again. While it was away or slow, nothing could be "
                f"elected, for up to {milliseconds(waited['waited_ms'])}."
            )
            steps.insert(1, self._step(waited, -round(waited["lasted_ms"]), text))
        for turn in self._turns:
            steps.extend(self._turn(turn))
        steps += [
            self._step(answer, -answer.get("queued_ms", 0.0), sentence(answer), tuple(answer.get("errors", [])))
            for answer in self._last_answers()
        ]
        elections = [
            (index, state)
            for index, turn in enumerate(self._turns)
            for state in turn.get("states", [])
            if self._is_led_anew(turn, state)
        ]
        last = {state["partition"]: state for _, state in elections}
        led_later: dict[str, float] = {}
        for entry in self._entries[self._last_turn + 1 :]:
            for state in entry.get("states", []):
                if state["leader"] != NO_LEADER:
                    led_later.setdefault(state["partition"], self._at(entry, state["at_ms"]))
        without = sorted(p for p, state in last.items() if state["leader"] == NO_LEADER)
        late = [p for p in without if p in led_later]
        former: dict[str, int | None] = {}
        for _, state in elections:
            former.setdefault(state["partition"], state.get("leader_before"))
        ran_on = {p for p, leader in former.items() if leader in self._back and last[p]["leader"] != NO_LEADER}
        led: set[tuple[int, int]] = set()
        replacing: set[tuple[int, int]] = set()
        """Turns with the leaders that they elected in the end: of partitions that had lost theirs, and of `ran_on`."""
        for index, state in elections:
            if state is last[state["partition"]] and state["leader"] != NO_LEADER:
                (replacing if state["partition"] in ran_on else led).add((index, state["leader"]))
        elected = sum(state["leader"] != NO_LEADER for state in last.values())
        written = [
            self._at(self._turns[index], state["at_ms"])
            for index, state in elections
            if state["leader"] != NO_LEADER and state["partition"] not in ran_on
        ]
        unlisted = 0
        cut_short: list[int] = []
        for index, turn in enumerate(self._turns):
            if turn.get("states_omitted"):
                listed = [state["leader"] for state in turn["states"] if self._is_led_anew(turn, state)]
                more_lost = max(0, turn.get("leaderless", 0) - listed.count(NO_LEADER))
                more_elected = self._led_anew(turn) - len(listed) - more_lost
                unlisted += more_lost
                if not more_elected:
                    continue
                # The list of states is cut, so every broker that got orders must have confirmed them.
                elected += more_elected
                written.append(self._at(turn, turn["written_at_ms"]))
                cut_short.append(index)
                led |= {
                    (index, order["broker"]) for order in turn.get("sent", []) if order["request"] == "LeaderAndIsr"
                }
        led_ms, replaced_ms = self._all_confirmed_ms(led), self._all_confirmed_ms(replacing)
        outages = self._outages((index, state) for index, state in elections if state["partition"] not in ran_on)
        lengths = [each.length_ms(led_ms is not None) for of_one in outages.values() for each in of_one]
        lengths += [self._unlisted_ms(index, led_ms is not None) for index in cut_short]
        left = [
            self._at(turn, state["at_ms"]) - min(self._lost_ms(index, broker) for broker in removed)
            for index, turn in enumerate(self._turns)
            for state in turn.get("states", [])
            if not self._is_led_anew(turn, state) and (removed := set(state.get("isr_before", ())) - set(state["isr"]))
        ]
        short, enough_ms = self._short_of_replicas()
        return Story(
            self._title(),
            self._began_ms,
            tuple(sorted(steps, key=lambda step: step.at_ms)),
            elected,
            tuple(p for p in without if p not in led_later),
            max(written, default=None),
            None if led_ms is None else max([led_ms, *written]),
            short,
            enough_ms,
            self._noticed_late and not self._beginnings(),
            tuple(late),
            max((led_later[p] - outages[p][-1].since_ms for p in late), default=None),
            max(left, default=None),
            tuple(sorted({leader for p in ran_on if (leader := former[p]) is not None})),
            len(ran_on),
            replaced_ms,
            unlisted,
            max((length_ms for length_ms in lengths if length_ms is not None), default=None),
        )

    def _outages(self, elections: Iterable[tuple[int, dict[str, Any]]]) -> dict[str, list[_Outage]]:
        """Return since when each partition had no leader, and until when. An outage continues over an election if the
        elected leader was lost before it had confirmed."""
        found: dict[str, list[_Outage]] = {}
        for index, state in elections:
            outages = found.setdefault(state["partition"], [])
            lost_ms = self._lost_ms(index, state.get("leader_before"))
            last = outages[-1] if outages else None
            if last is None or (last.confirmed_ms is not None and last.confirmed_ms <= lost_ms):
                outages.append(_Outage(lost_ms, None, None))
            written_ms = confirmed_ms = None
            if state["leader"] != NO_LEADER:
                written_ms = self._at(self._turns[index], state["at_ms"])
                answered_ms = self._confirmed_ms(index, state["leader"])
                confirmed_ms = None if answered_ms is None else max(answered_ms, written_ms)
            outages[-1] = _Outage(outages[-1].since_ms, written_ms, confirmed_ms)
        return found

    def _unlisted_ms(self, index: int, is_confirmed: bool) -> float:
        """Return the longest time that a partition that this turn elected a leader for, and does not list, can have
        had none."""
        turn = self._turns[index]
        lost = victims_of(self._entries, self._indexes[index])
        brokers = {order["broker"] for order in turn.get("sent", []) if order["request"] == "LeaderAndIsr"}
        until = [self._at(turn, turn["written_at_ms"])]
        if is_confirmed:
            until += [at_ms for broker in brokers if (at_ms := self._confirmed_ms(index, broker)) is not None]
        return max(until) - min((self._lost_ms(index, broker) for broker in lost), default=0.0)

    def _lost_ms(self, index: int, broker_id: int | None) -> float:
        """Return when the broker was lost that this turn has replaced: at the first sign of that since it was back last
        time, and at the turn if there is none. None or NO_LEADER: the beginning."""
        if broker_id is None or broker_id == NO_LEADER:
            return 0.0
        before = self._entries[self.first : self._indexes[index]]
        back_ms = max((e["time_ms"] for e in before if broker_id in came_back([e], 0, 1)), default=0)
        signs_ms = [at_ms for lost, at_ms in self._losses if lost == broker_id and at_ms >= back_ms]
        return max(0.0, float(min([self._turns[index]["time_ms"], *signs_ms]) - self._began_ms))

    def _find_losses(self) -> Iterator[tuple[int, int]]:
        """Yield brokers with times at which they were lost, as far as is recorded."""
        for sign in self._signs:
            yield sign["controller"] if sign["event"] == "Resignation" else sign["broker"], began_ms(sign)
        for silence in self._silences:
            yield silence["broker"], began_ms(silence)
        for entry in (*self._ended.values(), *self._stalls.values()):
            yield entry["controller"], began_ms(entry)
        for entry in self._disks:
            yield from ((failed["broker"], entry["time_ms"]) for failed in entry["failed_disks"])
        for index in self._indexes:
            yield from ((broker, self._entries[index]["time_ms"]) for broker in victims_of(self._entries, index))

    def _short_of_replicas(self) -> tuple[tuple[str, ...], float | None]:
        """Return the led partitions with fewer replicas in sync than min.insync.replicas after the last turn, and the
        time until all had enough, if it is recorded."""
        last = {state["partition"]: state for turn in self._turns for state in turn.get("states", [])}
        short = {p: state for p, state in last.items() if state["leader"] != NO_LEADER and _is_short(state)}
        enough: dict[str, float] = {}
        for entry in self._entries[self._last_turn + 1 :]:
            for state in (*entry.get("adopted", []), *entry.get("states", [])):
                if state["partition"] in short and not _is_short(state):
                    enough.setdefault(state["partition"], self._at(entry, state["at_ms"]))
        enough_ms = max(enough.values(), default=None) if len(enough) == len(short) else None
        return tuple(sorted(short, key=is_internal)), enough_ms

    def _all_confirmed_ms(self, leaders: Iterable[tuple[int, int]]) -> float | None:
        """Return the time at which the last of these leaders, each with its turn, confirmed its leadership. None: there
        is none, or not all have."""
        confirmed = [self._confirmed_ms(turn, broker) for turn, broker in leaders]
        known = [at_ms for at_ms in confirmed if at_ms is not None]
        return max(known, default=None) if len(known) == len(confirmed) else None

    def _confirmed_ms(self, turn: int, broker: int) -> float | None:
        """Return the time at which the broker confirmed its leadership, in answer to the orders of this turn or a later
        one. None: not recorded."""
        answers = [
            (index, self._at(answer, -answer.get("queued_ms", 0.0)))
            for index, answer in self._answers
            if answer["event"] == "LeaderAndIsrAnswered"
            and index >= turn
            and answer["broker"] == broker
            and not answer.get("errors")
        ]
        first = min((index for index, _ in answers), default=None)
        return max((at_ms for index, at_ms in answers if index == first), default=None)

    def _title(self) -> str:
        changes = [turn for turn in self._turns if turn["event"] == "Startup"]
        gone = {b for turn in self._turns for b in (*turn.get("lost", []), *turn.get("unreachable", []))}
        gone |= {silence["broker"] for silence in self._silences} | set(self._stalls)
        gone |= {failed["broker"] for entry in self._disks for failed in entry["failed_disks"]} - self._stopped
        lost, stopped = sorted(gone - self._stopped - self._back), sorted(self._stopped)
        happened = []
        if stopped:
            happened.append(f"{all_of('broker', stopped)} stopped cleanly")
        if lost:
            happened.append(f"{all_of('broker', lost)} {'was' if len(lost) == 1 else 'were'} lost{self._why(lost)}")
        if again := sorted(gone & self._back):
            is_told = not self._without_zookeeper and self._ended.keys() >= {*again}
            why = (
                f" (no ZooKeeper for {milliseconds(longest_away_ms(self._ended[b] for b in again))})" if is_told else ""
            )
            happened.append(f"{all_of('broker', again)} lost the registration and registered again{why}")
        if changes:
            controller = changes[-1]["controller"]
            before = controller_before(self._entries, changes[-1]["epoch"])
            is_again = controller_before(self._entries, changes[0]["epoch"]) == controller
            moved = f"broker {controller} " + ("was elected controller again" if is_again else "became the controller")
            if self._first_started is changes[-1]:
                moved = f"all brokers had ended, and broker {controller} was started and became the controller"
            elif not (happened or is_again or before is None):
                moved += f" in the place of broker {before}"
            is_named = before == controller or not happened
            if is_named and before in self._ended and not self._without_zookeeper:
                moved += f" (no ZooKeeper for {milliseconds(self._ended[before]['away_ms'])})"
            happened.append(moved)
        away = self._without_zookeeper
        return " and ".join(happened) + (
            f" (ZooKeeper was away for {milliseconds(longest_away_ms(away))})" if away else ""
        )

    def _why(self, lost: list[int]) -> str:
        """Return why these brokers were lost, in brackets, as far as they have recorded it."""
        reasons = []
        if full := [broker for broker in lost if any(has_full_disk(entry, broker) for entry in self._disks)]:
            reasons.append("full disk" if full == lost else f"full disk of {all_of('broker', full)}")
        if stalled := [broker for broker in lost if broker in self._stalls]:
            whose = all_of("broker", stalled) if stalled != lost else "it" if len(lost) == 1 else "they"
            longest_ms = max(float(self._stalls[broker]["lasted_ms"]) for broker in stalled)
            reasons.append(f"{whose} did not run for {milliseconds(longest_ms)}")
        return f" ({', '.join(reasons)})" if reasons else ""

    def _only_registered_again(self, first_turn: int) -> set[int]:
        """Return the brokers that registered again soon, or have recorded that they had only no ZooKeeper, and were
        found neither unreachable nor silent. Their sessions had ended, for instance because ZooKeeper was away."""
        until_ms = self._entries[self._last_turn]["time_ms"] + _BACK_WITHIN_MS
        soon = [entry for entry in self._entries[first_turn:] if entry["time_ms"] <= until_ms]
        noticed = {entry["broker"] for entry in (*self._signs, *self._silences) if "broker" in entry} | self._stopped
        noticed |= set(self._stalls)
        noticed |= {failed["broker"] for entry in self._disks for failed in entry["failed_disks"]}
        return (came_back(soon, 0, len(soon)) | set(self._ended)) - noticed

    # -- the entries of this failover --

    def _find_signs(self, first_turn: int) -> Iterator[tuple[int, Entry]]:
        """Yield suspicions and removals of the victims, and resignations, since the previous failover, with their
        indexes. A broker that came back later was lost in an earlier one."""
        found: list[tuple[int, Entry]] = []
        back: set[int] = set()
        for index in range(first_turn - 1, -1, -1):
            entry = self._entries[index]
            is_old = self._entries[first_turn]["time_ms"] - entry["time_ms"] > SIGNS_WITHIN_MS
            if is_old or index == self._previous:
                break
            back |= came_back([entry], 0, 1)
            lost = entry["controller"] if entry["event"] == "Resignation" else entry.get("broker")
            if entry["event"] in _SIGNS and lost not in back and self._is_of_victim(entry, self._entries[first_turn]):
                found.insert(0, (index, entry))
        yield from found
        for index, entry in enumerate(self._entries[first_turn:], first_turn):
            # A suspicion by the controller may be recorded after the loss; any other sign comes before a turn.
            is_late = index > self._last_turn and entry["event"] != "BrokerSuspected"
            if entry["event"] in _SIGNS and not is_late and self._is_of_victim(entry, self._turns[-1]):
                yield index, entry

    def _find_silences(self) -> Iterator[tuple[int, Entry]]:
        """Yield when brokers that carried out the orders had heard from the victims for the last time. The controller's
        own broker may have recorded that before the turn, whose entry is recorded when it is done. A silence that was
        over when the broker stopped or crashed does not count, nor that which a broker heard when it was cut off
        itself."""
        ended = {sign["broker"] for sign in self._signs if "broker" in sign} | self._stopped
        ended |= {failed["broker"] for entry in self._disks for failed in entry["failed_disks"]}
        since_ms, epochs = self._turns[0]["time_ms"] - CLOCKS_DIFFER_MS, {turn["epoch"] for turn in self._turns}
        for index, entry in enumerate(self._entries):
            if entry["event"] != SILENT or entry["time_ms"] < since_ms or entry["epoch"] not in epochs:
                continue
            was_over = "heard_again_ms" in entry and entry["broker"] in ended
            was_away = any(
                entry["controller"] in other.get("added", ())
                for other in self._entries
                if began_ms(entry) <= other["time_ms"] <= entry["time_ms"]
            )
            if self._is_victim(entry["broker"]) and not (was_over or was_away):
                yield index, entry

    def _find_ended_sessions(self) -> Iterator[Entry]:
        """Yield the entries of brokers that had no ZooKeeper at a turn, and whose sessions ended: those of victims, and
        of others if ZooKeeper was away. A broker that hung had it until it woke up, and loses it then. A controller
        records the end of its session as a resignation."""
        for entry in self._entries:
            is_one = entry["event"] == SESSION_ENDED or (entry["event"] == "Resignation" and is_news(entry))
            if not is_one or entry.get("away_ms", 0.0) < CLOCKS_DIFFER_MS:
                continue
            before_ms = [entry["time_ms"] - turn["time_ms"] for turn in self._turns]
            if any(-TOGETHER_MS <= each_ms < entry["away_ms"] for each_ms in before_ms):
                yield entry | {"event": SESSION_ENDED}

    def _beginnings(self) -> list[Entry]:
        """Return the entries that say since when a victim was not heard, heard no ZooKeeper, or did not run."""
        return [*self._silences, *self._ended.values(), *self._stalls.values()]

    def _find_stalls(self) -> Iterator[tuple[int, Entry]]:
        """Yield victims that did not run when they were replaced, unless there is another reason, with their entries.
        Connections break if a process ends: if that was noticed, it must have run again only later."""
        noticed = {sign["broker"]: sign["time_ms"] for sign in self._signs if "broker" in sign}
        known = self._stopped | set(self._ended)
        known |= {failed["broker"] for entry in self._disks for failed in entry["failed_disks"]}
        unheard = {silence["broker"] for silence in self._silences}
        for broker, stall in stalls_over(self._entries, self._indexes, unheard).items():
            if broker not in known and noticed.get(broker, 0) <= stall["time_ms"]:
                yield broker, stall

    def _find_failed_disks(self, first_turn: int) -> Iterator[tuple[int, Entry]]:
        """Yield the entries in which victims have reported that they lost log directories, since the failover before:
        a broker ends with its last one. It closes its connections first, so that others may have found it unreachable
        when its report arrives."""
        since_ms = self._entries[first_turn]["time_ms"] - SIGNS_WITHIN_MS
        until_ms = self._entries[self._last_turn]["time_ms"] + SIGNS_WITHIN_MS
        for index, entry in enumerate(self._entries[self._previous + 1 :], self._previous + 1):
            if not since_ms <= entry["time_ms"] <= until_ms:
                continue
            failed = {failed["broker"] for failed in entry.get("failed_disks", []) if self._is_victim(failed["broker"])}
            back = came_back(self._entries, index + 1, first_turn) | came_back(
                self._entries, self._last_turn + 1, index
            )
            if failed - back:
                yield index, entry

    def _no_broker_ran(self, turn: Entry, whole: Entry) -> bool:
        """Whether no broker ran until the controller that this turn elected was started. A controller records each
        broker that registers, and a broker that runs notices the end of a controller. `whole`: with all topics."""
        before, up_ms = controller_before(self._entries, turn["epoch"]), turn.get("broker_up_ms")
        if before is None or up_ms is None or before in self._stalls or not self._silent([before], turn):
            return False
        earlier = [e for e in self._entries if e["epoch"] < turn["epoch"] and e["event"] not in INTERRUPTIONS]
        started_ms = turn["time_ms"] - up_ms
        if max(e["time_ms"] for e in earlier) >= started_ms or any(began_ms(e) < started_ms for e in self._silences):
            return False
        return {*turn.get("brokers", [])} <= started_before(whole, before, earlier)

    def _is_led_anew(self, turn: Entry, state: dict[str, Any]) -> bool:
        """Whether the partition had no leader, or has another."""
        return turn is self._first_started or is_election(state)

    def _led_anew(self, turn: Entry) -> int:
        """Return the number of such partitions, listed or not."""
        return int(turn["elected"] if turn is not self._first_started else len(turn["states"]) + turn["states_omitted"])

    def _is_victim(self, broker_id: int) -> bool:
        """Whether the broker is a victim. The entries of a controller that hangs or is gone are missing, so it may be
        known only by its absence."""
        return broker_id in self._victims or any(broker_id not in t["brokers"] for t in self._turns if "brokers" in t)

    def _is_of_victim(self, sign: Entry, turn: Entry) -> bool:
        if sign["event"] != "Resignation":
            return sign.get("broker") in self._victims
        # A controller that hung finds out when it wakes up that its session has expired, long after another took over.
        woke_up = is_news(sign) and sign["time_ms"] > turn["time_ms"]
        return sign["controller"] in self._victims and not woke_up

    def _find_answers(self, first_turn: int) -> Iterator[tuple[int, Entry]]:
        """Yield the answers to the orders of this failover, each with the index of the turn that sent them."""
        awaited = Counter(
            (index, order["broker"], order["request"])
            for index, turn in enumerate(self._turns)
            for order in turn.get("sent", [])
        )
        for entry in self._entries[first_turn:]:
            if entry["event"] not in _ANSWERS:
                continue
            queued_at_ms = entry["time_ms"] - entry.get("queued_ms", 0.0) - entry.get("took_ms", 0.0)
            for index, turn in enumerate(self._turns):
                key = index, entry["broker"], entry["request"]
                is_of_term = (turn["controller"], turn["epoch"]) == (entry["controller"], entry["epoch"])
                late_ms = 1 if "sent_omitted" in turn else _LATE_MS  # otherwise the answers are counted
                is_meant = turn["time_ms"] - 1 <= queued_at_ms <= turn["time_ms"] + turn["total_ms"] + late_ms
                if is_of_term and is_meant and (awaited[key] > 0 or "sent_omitted" in turn):
                    awaited[key] -= 1
                    yield index, entry
                    break

    def _last_answers(self) -> list[Entry]:
        """Return each broker's last answer of a kind to a turn, with the totals of the answers before it, because one
        order may take several requests. Turns are not added up: their orders concern the same partitions."""
        last: dict[tuple[int, int, str], Entry] = {}
        for turn, answer in self._answers:
            key = turn, answer["broker"], answer["event"]
            before = last.get(key, {})
            last[key] = answer | {
                "partitions": before.get("partitions", 0) + answer.get("partitions", 0),
                "errors": [*before.get("errors", []), *answer.get("errors", [])],
            }
        return list(last.values())

    # -- its steps --

    def _ended_sessions(self) -> Iterator[Step]:
        together = self._without_zookeeper
        if together:
            first = min(together, key=began_ms)
            longest = milliseconds(longest_away_ms(together))
            text = (
                f"{all_of('Broker', sorted(entry['controller'] for entry in together))} hear from ZooKeeper for the "
                f"last time. ZooKeeper was away for all of them, for up to {longest}, so that nothing could be "
                "elected, and their sessions ended."
            )
            yield self._step(first, began_ms(first) - first["time_ms"], text)
        for ended in self._ended.values():
            if ended not in together:
                text = (
                    f"Broker {ended['controller']} hears from ZooKeeper for the last time. It had no ZooKeeper for "
                    f"{milliseconds(ended['away_ms'])}, and its session ended."
                )
                yield self._step(ended, began_ms(ended) - ended["time_ms"], text)

    def _at(self, entry: Entry, offset_ms: float) -> float:
        """Clocks differ, so no step is placed before the beginning."""
        return max(0.0, round(float(entry["time_ms"] - self._began_ms + offset_ms), 1))

    def _step(self, entry: Entry, offset_ms: float, text: str, details: tuple[str, ...] = ()) -> Step:
        return Step(self._at(entry, offset_ms), entry["controller"], entry["epoch"], entry["event"], text, details)

    def _turn(self, turn: Entry) -> Iterator[Step]:
        if turn["event"] == "Startup":
            yield from self._new_controller(turn)
        elif turn["event"] == STOPS:
            yield self._step(turn, 0.0, sentence(turn))
        else:
            is_back = set(turn["lost"]) <= set(turn.get("added", []))
            text = f"{sentence(turn)} " + (
                "Its former registration is gone, and with it what it led."
                if is_back
                else "Its entry in /brokers/ids is no longer there."
            )
            silent = self._silent(turn["lost"], turn)
            self._noticed_late |= bool(silent)
            unheard = {each["broker"] for each in self._silences}
            for broker in (broker for broker in silent if broker in self._stalls):
                text += (
                    f" ZooKeeper ended the session of broker {broker}, {_SESSION_TIMEOUT} after the last heartbeat, "
                    f"because {not_running(self._stalls[broker])}."
                )
            silent = [broker for broker in silent if broker not in {*turn.get("added", []), *self._stalls}]
            if silent and unheard.issuperset(silent):
                text += (
                    f" Nothing came from {_brokers(silent)} any more: ZooKeeper ended {_sessions(silent)}, "
                    f"{_SESSION_TIMEOUT} after the last heartbeat, because of a hang or a cut network."
                )
            elif silent:
                text += (
                    f" It is not recorded that {_brokers(silent)} could not be reached before: ZooKeeper ended "
                    f"{_sessions(silent)}, {_SESSION_TIMEOUT} after the last heartbeat, because of a hang, because "
                    "it was cut off from ZooKeeper, or because ZooKeeper was away."
                )
            yield self._step(turn, 0.0, text)
        yield from self._elections(turn)
        sent = [order for order in turn.get("sent", []) if order["partitions"]]
        if sent:
            told = tuple(cut(orders(sent), turn.get("sent_omitted", 0)))
            text = "The controller sends the brokers their new roles and the metadata for clients."
            yield self._step(turn, sent[0]["at_ms"], text, told)

    def _silent(self, brokers: Iterable[int], turn: Entry) -> list[int]:
        """Return those brokers that were not found unreachable before, and had not announced their stop."""
        known = {sign["controller"] if sign["event"] == "Resignation" else sign["broker"] for sign in self._signs}
        known |= {failed["broker"] for entry in self._disks for failed in entry["failed_disks"]} | set(self._ended)
        now = next(index for index, entry in enumerate(self._entries) if entry is turn)
        for index, entry in enumerate(self._entries[:now]):
            if entry["event"] == STOPS and turn["time_ms"] - entry["time_ms"] <= SIGNS_WITHIN_MS:
                known |= {entry.get("broker")} - came_back(self._entries, index, now)
        return [broker for broker in brokers if broker not in known]

    def _learned_late(self, before: int, turn: Entry) -> str | None:
        """Return for how long the controller before had no connection to ZooKeeper, if it learned of its successor only
        when it was connected again."""
        for entry in self._entries:
            of_its_term = entry["event"] == "Resignation" and entry["epoch"] == turn["epoch"] - 1
            if of_its_term and entry["controller"] == before and entry["time_ms"] > turn["time_ms"]:
                away_ms = entry.get("away_ms", 0.0)
                lost_ms = turn["time_ms"] - entry["time_ms"] + away_ms
                if lost_ms > 0:  # otherwise it hung, and lost the connection when it woke up
                    return (
                        f"Broker {before}, the controller until now, had lost its connection to ZooKeeper "
                        f"{milliseconds(lost_ms)} before, and was without it for {milliseconds(away_ms)}."
                    )
        return None

    def _why_it_ended(self, before: int) -> str | None:
        """Return why the controller before left office, if its last log directory had failed. It ends then, and has
        no other place for its own entries."""
        if any(sign.get("broker") == before and sign["event"] in BY_OTHERS for sign in self._signs):
            return None  # it was still in office when it could not be reached any more
        disks = [disk for disk in self._disks if any(failed["broker"] == before for failed in disk["failed_disks"])]
        if not disks:
            return None
        why = "has no space left" if any(has_full_disk(disk, before) for disk in disks) else "has failed"
        return f"Broker {before}, the controller until now, has left office and ends: its log directory {why}."

    def _why_unnoticed(self, before: int, turn: Entry) -> str:
        if turn is self._first_started:
            return (
                f"Broker {before}, the controller until now, is gone, and no other broker ran to replace it: broker "
                f"{turn['controller']} was started {milliseconds(turn['broker_up_ms'])} before."
            )
        stall = self._stalls.get(before)
        why = "it hung, or was cut off from ZooKeeper, or ZooKeeper was away" if stall is None else not_running(stall)
        return (
            f"Broker {before}, the controller until now, has not resigned and was not found unreachable: ZooKeeper "
            f"ended its session, {_SESSION_TIMEOUT} after its last heartbeat, because {why}."
        )

    def _new_controller(self, turn: Entry) -> Iterator[Step]:
        before = controller_before(self._entries, turn["epoch"])
        away = None if before is None else self._learned_late(before, turn)
        if before is not None and self._silent([before], turn):
            self._noticed_late = True
            away = away or self._why_unnoticed(before, turn)
        if away is None and before is not None:
            away = self._why_it_ended(before)
        if away is not None:
            yield self._step(turn, 0.0, away)
        text = (
            f"Broker {turn['controller']} is elected controller: it was the first to create /controller in "
            f"ZooKeeper. Its epoch is {turn['epoch']}; brokers now reject lower epochs."
        )
        version = f"every write checks that /controller_epoch is at version {turn.get('epoch_version', '?')}"
        yield self._step(turn, 0.0, text, (version,))
        if "read_at_ms" in turn:
            what = (
                f"{counted(len(turn['brokers']), 'broker')}, {counted(turn['topics'], 'topic')} and "
                f"{counted(turn['partitions'], 'partition')}"
            )
            yield self._step(turn, turn["read_at_ms"], f"It has read the cluster from ZooKeeper: {what}.")
            for broker_id in turn.get("unreachable", []):
                text = f"Broker {broker_id} is still registered but unreachable: its registration is removed."
                removed = [w for w in turn.get("writes", []) if w.startswith(f"remove /brokers/ids/{broker_id} ")]
                yield self._step(turn, turn["read_at_ms"], text, tuple(removed))

    def _elections(self, turn: Entry) -> Iterator[Step]:
        states = turn.get("states", [])
        elected = [state for state in states if self._is_led_anew(turn, state)]
        others = [state for state in states if not self._is_led_anew(turn, state)]
        omitted = turn.get("states_omitted", 0)
        # The entry counts all elections, and lists the first states.
        more_elected = self._led_anew(turn) - len(elected) if omitted else 0
        if elected or more_elected:
            count = counted(len(elected) + more_elected, "partition")
            leaders = "Leaders" if turn is self._first_started else "New leaders"
            text = f"{leaders} are elected for {count}, each from the in-sync replicas (the ISR)."
            if not all(state["leader"] in state.get("isr_before", state["isr"]) for state in elected):
                text = f"{leaders} are elected for {count}: from the in-sync replicas (the ISR) or, if none of these "
                text += "is alive, from the others."
            if any(state["leader"] == NO_LEADER for state in elected):
                text = f"{leaders} are sought for {count}; a partition without a live in-sync replica gets none."
            at_ms = turn["written_at_ms"] if omitted else elected[-1]["at_ms"]
            yield self._step(turn, at_ms, text, tuple(cut(state_lines(elected), more_elected)))
        more_others = omitted - more_elected
        if others or more_others:
            count = counted(len(others) + more_others, "partition")
            text = f"In {count} the leader stays, and the in-sync replicas change."
            at_ms = turn["written_at_ms"] if omitted else others[-1]["at_ms"]
            yield self._step(turn, at_ms, text, tuple(cut(state_lines(others), more_others)))


def _brokers(ids: Sequence[int]) -> str:
    return "it" if len(ids) == 1 else all_of("broker", ids)


def _sessions(of: Sequence[int]) -> str:
    return "its session" if len(of) == 1 else "their sessions"


def _is_short(state: dict[str, Any]) -> bool:
    return bool(len(state["isr"]) < state.get("min_isr", 0))
