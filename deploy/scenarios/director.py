"""Plays a scenario on a stage: topics, clients, steps, recovery, judgement."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random

import msgspec

from minibroker.client.admin import Admin
from minibroker.client.administering.configs import ConfigChange, ConfigResource
from minibroker.client.administering.topics import NewTopic
from minibroker.deploy.local.who import Coordinated, Member, name_of
from minibroker.deploy.moving import lead_by_first, order_after_move
from minibroker.deploy.scenarios.ledger import Ledger, Promise, Read, judge, measure, seconds
from minibroker.deploy.scenarios.model import Client, Scenario, Step
from minibroker.deploy.scenarios.programs import read_all
from minibroker.deploy.scenarios.stage import NoSuchMember, Picture, Stage, coordinated_in, resolve
from minibroker.deploy.scenarios.words import FAULTS, Action, Event, parse_partition
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.world import World

AT_WORK_WITHIN_S = 60.0
_LATEST_S = 0.05
"""A seed delays each step by up to this, so that seeds meet different moments."""
_POLL_S = 0.01
_DRAINED_WITHIN_S = 60.0

_BY_ADMIN = ("set", "elect unclean", "elect preferred", "reassign to")
_MOMENTS = ("the controller is about to send LeaderAndIsr", "is about to arrive")


class Happening(msgspec.Struct, frozen=True):
    """A line of the report."""

    at_s: float
    """Seconds since the clients were at work."""
    text: str


class Outcome(msgspec.Struct, frozen=True):
    """What a run did and measured."""

    runner: str
    seed: int | None
    promises: list[Promise]
    happenings: list[Happening]
    stall_s: float
    rebalance_s: float
    sent: int
    acknowledged: int
    refused: int
    lost: int
    errors: dict[str, int]

    @property
    def kept(self) -> bool:
        return all(promise.kept for promise in self.promises)


class _Missed(Exception):
    """The scenario could not go on; the text says why."""


async def play(scenario: Scenario, stage: Stage, seed: int | None) -> Outcome:
    """Play the scenario. A step that cannot be done is a broken promise, and ends the steps."""
    return await _Play(scenario, stage, seed).play()


class _Play:
    def __init__(self, scenario: Scenario, stage: Stage, seed: int | None) -> None:
        self._scenario = scenario
        self._stage = stage
        self._seed = seed
        self._dice = Random(f"{seed} steps")
        self._ledger = Ledger()
        self._happenings: list[Happening] = []
        self._names: dict[str, Member] = {}
        self._began_s = stage.now_s()
        self._before: Picture | None = None
        """The cluster before the last step with a fault."""
        self._acknowledged = self._refused = 0
        """At the end of the previous step."""
        self._partitions = [
            TopicPartition(topic.name, number) for topic in scenario.topics for number in range(topic.partitions)
        ]

    async def play(self) -> Outcome:
        scenario, stage, ledger = self._scenario, self._stage, self._ledger
        trouble: list[Promise] = []
        read: dict[TopicPartition, list[Read]] = {}
        whole_after_s: float | None = None
        unbalanced: Sequence[TopicPartition] = ()
        try:
            await self._create_topics()
            for client in scenario.clients:
                if not client.starts_later:
                    stage.start_client(client, ledger)
            await self._until(self._is_at_work, AT_WORK_WITHIN_S, "the clients are not at work")
            self._began_s = ledger.began_s = stage.now_s()
            for step in scenario.steps:
                await self._do(step)
            await asyncio.sleep(scenario.calm_s)
            whole_after_s, unbalanced = await self._recover()
            ledger.producing = False
            read = await self._drain()
        except _Missed as missed:
            trouble.append(Promise("the scenario can be played", False, str(missed)))
        finally:
            ledger.producing = ledger.running = False
        measured = measure(scenario, ledger, read)
        promises = trouble or judge(scenario, ledger, measured, read, whole_after_s, unbalanced)
        for at_s, text in stage.notes():
            self._happenings.append(Happening(round(at_s - self._began_s, 3), text))
        return Outcome(
            runner=stage.runner,
            seed=self._seed,
            promises=promises,
            happenings=sorted(self._happenings, key=lambda happening: happening.at_s),
            stall_s=round(measured.stall.seconds, 3),
            rebalance_s=round(measured.rebalance.seconds, 3),
            sent=measured.sent,
            acknowledged=measured.acknowledged,
            refused=measured.refused,
            lost=0 if trouble else measured.lost,
            errors=dict(measured.errors),
        )

    def _happens(self, text: str) -> None:
        self._happenings.append(Happening(round(self._stage.now_s() - self._began_s, 3), text))

    # -- before and after the steps --

    async def _create_topics(self) -> None:
        topics = [
            NewTopic(topic.name, topic.partitions, topic.replicas, topic.configs) for topic in self._scenario.topics
        ]

        async def create(world: World | None) -> None:
            async with Admin(self._stage.bootstrap, world=world) as admin:
                await admin.create_topics(topics)

        try:
            await self._stage.run(create)
        except MinibrokerError as error:
            raise _Missed(f"the topics cannot be created: {error}") from None

    async def _is_at_work(self) -> bool:
        if self._ledger.crashed:
            raise _Missed("; ".join(self._ledger.crashed))
        return all(self._works(client) for client in self._scenario.clients if not client.starts_later)

    def _works(self, client: Client) -> bool:
        of_topic = [partition for partition in self._partitions if partition.topic == client.produces]
        if client.produces is not None and client.consumes is None:
            acknowledged = self._ledger.acknowledged[client.name]
            return client.acks == "0" or all(acknowledged.get(partition) for partition in of_topic)
        if client.group is not None and client.produces is None:
            consumed = {partition for partition in self._partitions if partition.topic == client.consumes}
            owners = self._ledger.owners(client.group)
            return owners.keys() >= consumed and len({*owners.values()}) >= min(client.members, len(consumed))
        return True

    async def _recover(self) -> tuple[float | None, list[TopicPartition]]:
        """Undo the faults, wait until all is whole, and return how long that took, and who does not lead."""
        scenario, stage, ledger = self._scenario, self._stage, self._ledger
        began_s = stage.now_s()
        if scenario.heals:
            self._happens("all faults are undone")
            await stage.restore()
        within_s = scenario.expect.whole_within_s
        try:
            await self._until(self._is_whole if scenario.heals else self._leads, within_s, "")
            before = {partition: ledger.acks(partition) for partition in self._partitions}
            writers = {
                client.produces
                for client in scenario.clients
                if client.produces and not client.consumes and not client.starts_later and client.acks != "0"
            }

            async def goes_on() -> bool:
                return all(ledger.acks(name) > acks for name, acks in before.items() if name.topic in writers)

            if not ledger.crashed and "ProducerFenced" not in ledger.errors:
                await self._until(goes_on, within_s, "")
        except _Missed:
            return None, self._unbalanced(await stage.picture())
        whole_after_s = stage.now_s() - began_s
        if scenario.expect.leaders_balanced:

            async def is_balanced() -> bool:
                return not self._unbalanced(await stage.picture())

            try:
                await self._until(is_balanced, within_s, "")
            except _Missed:
                return whole_after_s, self._unbalanced(await stage.picture())
        return whole_after_s, []

    async def _is_whole(self) -> bool:
        picture = await self._stage.picture()
        return (
            picture.controller is not None
            and picture.brokers >= set(self._stage.broker_ids)
            and all(
                partition in picture.partitions
                and picture.partitions[partition].leader is not None
                and set(picture.partitions[partition].isr) == set(picture.partitions[partition].replicas)
                for partition in self._partitions
            )
        )

    async def _leads(self) -> bool:
        picture = await self._stage.picture()
        return all(
            partition in picture.partitions and picture.partitions[partition].leader is not None
            for partition in self._partitions
        )

    def _unbalanced(self, picture: Picture) -> list[TopicPartition]:
        return [
            partition
            for partition in self._partitions
            if (state := picture.partitions.get(partition)) is None or state.leader != state.replicas[0]
        ]

    async def _drain(self) -> dict[TopicPartition, list[Read]]:
        """Wait until producers have ended and consumers have everything, end them, and read all topics."""
        scenario, stage, ledger = self._scenario, self._stage, self._ledger

        async def have_ended() -> bool:
            return not ledger.writers

        longest_s = max(client.delivery_timeout_s for client in scenario.clients)
        writers = ", ".join(sorted(ledger.writers))
        late = f"the producers {writers} have not ended {seconds(longest_s + _DRAINED_WITHIN_S)} after the last step"
        await self._until(have_ended, longest_s + _DRAINED_WITHIN_S, late)
        deadline_s = stage.now_s() + _DRAINED_WITHIN_S

        async def read(world: World | None) -> dict[TopicPartition, list[Read]]:
            return await read_all(stage.bootstrap, world, self._partitions)

        while True:
            try:
                found = await stage.run(read)
            except MinibrokerError as error:
                raise _Missed(f"the records cannot be read back: {error}") from None
            measured = measure(scenario, ledger, found)
            promises = judge(scenario, ledger, measured, found, 0.0, ())
            done = all(promise.kept for promise in promises if promise.text.startswith(("everything", "each input")))
            if done or stage.now_s() > deadline_s:
                ledger.running = False
                return found
            await asyncio.sleep(0.2)

    # -- steps --

    async def _do(self, step: Step) -> None:
        stage = self._stage
        if step.at_s is not None:
            await asyncio.sleep(max(0.0, self._began_s + step.at_s - stage.now_s()))
        elif step.after_s is not None:
            await asyncio.sleep(step.after_s)
        late_s = 0.0
        if step.when is not None:
            if step.when.kind in _MOMENTS:
                seen = await stage.moment(step.when, step.within_s)
                if seen is None:
                    raise self._missed(step, f'"{step.when.text}" did not come within {seconds(step.within_s)}')
                self._happens(f"{step.when.text}: {seen}")
            else:
                await self._wait_for(step, step.when)
                self._happens(step.when.text)
        elif self._seed is not None:
            late_s = self._dice.uniform(0, _LATEST_S)
        await asyncio.sleep(late_s)
        if any(action.verb in FAULTS for action in step.actions):
            self._before = await stage.picture()
        hit: list[Member] = []
        for action in step.actions:
            hit += await self._act(step, action)
        if step.name is not None and hit:
            self._names[step.name] = hit[0]
        self._acknowledged, self._refused = self._ledger.acknowledged_count, self._ledger.refused

    async def _wait_for(self, step: Step, event: Event) -> None:
        async def has_come() -> bool:
            return self._has_come(event, await self._stage.picture())

        await self._until(
            has_come, step.within_s, f'line {step.line}: "{event.text}" did not come within {seconds(step.within_s)}'
        )

    def _has_come(self, event: Event, picture: Picture) -> bool:
        before = self._before
        if "partition" in event.words:
            state = picture.partitions.get(event.partition)
            if state is None:
                return False
            former = before.partitions.get(event.partition) if before else None
            led = former.leader if former else None
            match event.kind:
                case "has in its ISR":
                    return len(state.isr) == int(event.words["count"])
                case "has a new leader":
                    return state.leader is not None and state.leader != led
                case "has no leader":
                    return state.leader is None
                case _:
                    return state.leader is not None
        match event.kind:
            case "there is a new controller":
                return picture.controller is not None and (before is None or picture.controller != before.controller)
            case "there is no controller":
                return picture.controller is None
            case "records are acknowledged":
                return self._ledger.acknowledged_count - self._acknowledged >= int(event.words["count"])
            case "records are refused":
                return self._ledger.refused - self._refused >= int(event.words["count"])
            case _:
                return picture.brokers >= set(self._stage.broker_ids) and all(
                    set(state.isr) == set(state.replicas) and state.leader is not None
                    for state in picture.partitions.values()
                )

    async def _act(self, step: Step, action: Action) -> list[Member]:
        stage = self._stage
        try:
            if action.verb in _BY_ADMIN:
                self._happens(action.text)
                await self._administer(action)
                return []
            if "client" in action.words:
                self._happens(action.text)
                name = action.words["client"]
                if action.verb == "kill client":
                    stage.kill_client(name, self._ledger)
                else:
                    [client] = [known for known in self._scenario.clients if known.name == name]
                    stage.start_client(client, self._ledger)
                return []
            if action.verb == "restart all in turn":
                await self._restart_in_turn(step)
                return []
            members: list[Member] = []
            if "who" in action.words:
                picture = await stage.picture()
                members = resolve(action.who(), picture, stage.broker_ids, self._names)
                if "other" in action.words:
                    members += resolve(action.who("other"), picture, stage.broker_ids, self._names)
                    if members[0] == members[1]:
                        raise NoSuchMember(f"both are {name_of(members[0])} now, which cannot be cut from itself")
            if action.verb == "move to another broker":
                return await self._move(action, members)
            by_id = action.words.get("who", "").isdecimal()
            shown = f" ({', '.join(map(name_of, members))})" if members and not by_id else ""
            self._happens(f"{action.text}{shown}")
            await stage.act(action, members)
            return members
        except (NoSuchMember, MinibrokerError) as error:
            raise self._missed(step, f'"{action.text}" cannot be done: {error}') from None

    async def _move(self, action: Action, members: list[Member]) -> list[Member]:
        who, picture, [former] = action.who(), await self._stage.picture(), members
        assert isinstance(who, Coordinated)
        assert isinstance(former, int)
        partition = coordinated_in(who, picture)
        state = picture.partitions[partition]
        order = order_after_move(partition, state.replicas, state.isr, former)
        self._happens(f"{action.text} (from {name_of(former)} to {name_of(order[0])})")

        async def move(world: World | None) -> None:
            async with Admin(self._stage.bootstrap, world=world) as admin:
                await lead_by_first(admin, partition, order)

        await self._stage.run(move)
        return members

    async def _administer(self, action: Action) -> None:
        words = action.words

        async def administer(world: World | None) -> None:
            async with Admin(self._stage.bootstrap, world=world) as admin:
                if action.verb == "set":
                    name, _, value = words["setting"].partition("=")
                    await admin.incremental_alter_configs(
                        {ConfigResource.of_topic(words["topic"]): [ConfigChange.set(name, value)]}
                    )
                elif action.verb == "reassign to":
                    brokers = [int(broker) for broker in words["brokers"].split(",")]
                    await admin.alter_partition_reassignments({parse_partition(words["partition"]): brokers})
                elif action.verb == "elect unclean":
                    await admin.elect_leaders("unclean", [parse_partition(words["partition"])])
                else:
                    await admin.elect_leaders("preferred")

        await self._stage.run(administer)

    async def _restart_in_turn(self, step: Step) -> None:
        for broker_id in self._stage.broker_ids:
            for verb in ("stop", "start"):
                self._happens(f"{verb} {broker_id}")
                await self._stage.act(Action(verb, f"{verb} {broker_id}", {"who": str(broker_id)}), [broker_id])
            await self._until(self._is_whole, step.within_s, f"broker {broker_id} is not in sync after its restart")

    # -- waiting --

    async def _until(self, condition: Callable[[], Awaitable[bool]], within_s: float, otherwise: str) -> None:
        deadline_s = self._stage.now_s() + within_s
        while not await condition():
            if self._ledger.crashed:
                raise _Missed("; ".join(self._ledger.crashed))
            if self._stage.now_s() > deadline_s:
                raise _Missed(otherwise)
            await asyncio.sleep(_POLL_S)

    def _missed(self, step: Step, text: str) -> _Missed:
        return _Missed(f"{self._scenario.path}:{step.line}: {text}")
