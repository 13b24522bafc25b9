"""Faults that wait for a moment in the life of a broker or a leader in which one side has acted and the other does not
know yet.

Each is laid, and strikes if its moment comes in time; both are counted. It strikes at the event itself (a process
begins, ZooKeeper is about to carry out a write, bytes are about to arrive), since the moment lasts a few milliseconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from minibroker.deploy.simulator.cluster import CONTROL_PORT, host_name
from minibroker.deploy.simulator.requests import request_key
from minibroker.deploy.simulator.transport import Arrival
from minibroker.deploy.simulator.zookeeper import VirtualSession
from minibroker.protocol import znodes
from minibroker.protocol.apis import LEADER_AND_ISR
from minibroker.protocol.world import ConnectionLoss, Create, Operation, SetData
from tests.simulation.storms.ground import Ground

T = TypeVar("T")

PATIENCE_S = 15.0
"""Seconds for which an ambush waits for its moment."""

_LOST = ConnectionLoss("the request was lost")


async def next_of(
    hooks: list[Callable[..., None]], wanted: Callable[..., T | None], refusal: Exception | None = None
) -> T | None:
    """Return the first result of `wanted` that is not None, or None after PATIENCE_S. `wanted` runs within each call of
    the hook and may strike there; for the wanted call, the hook then raises `refusal`, if given."""
    found: asyncio.Future[T] = asyncio.get_running_loop().create_future()

    def hook(*arguments: Any) -> None:
        if not found.done() and (result := wanted(*arguments)) is not None:
            if not found.done():  # `wanted` may have caused another call of the hook
                found.set_result(result)
            if refusal is not None:
                raise refusal

    hooks.append(hook)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return await found
    except TimeoutError:
        return None
    finally:
        hooks.remove(hook)


def broker_of(storm: Ground, host: str) -> int | None:
    return next((broker_id for broker_id in storm.cluster.broker_ids if host_name(broker_id) == host), None)


# --- A broker that starts --------------------------------------------------------------------------------------


async def ambush_of_a_start(storm: Ground) -> None:
    """Strike a broker while it recovers its logs, right after it has registered, or at its first order."""
    dice = storm.dice
    moments = {"process": _next_process, "registration": _next_registration, "first order": _next_first_order}
    moment = dice.choice(list(moments))
    kind = f"ambush of a start, {moment}"
    storm.event(f"{kind}: laid")
    if dice.random() < 0.5 and (victim := storm.some_broker()) is not None:
        storm.take_down(victim, storm.cluster.kill_broker, restart_after_s=dice.choice([0.0, 0.5]))
    broker_id = await moments[moment](storm)
    if broker_id is None:
        return
    await asyncio.sleep(dice.choice([0.0, 0.001, 0.005, 0.03]) * dice.random())
    if not storm.strikable(broker_id):
        return
    strike = dice.choice([_killed, _killed, _without_power, _disconnected, _without_zookeeper, _isolated])
    storm.event(f"{kind}: struck")
    storm.count("ambush of a start", f"broker {broker_id} at its {moment}: {strike.__name__[1:].replace('_', ' ')}")
    await strike(storm, broker_id)


async def _next_process(storm: Ground) -> int | None:
    return await next_of(storm.on_start, lambda broker_id: broker_id)


async def _next_registration(storm: Ground) -> int | None:
    def registers(session: VirtualSession, operations: Sequence[Operation]) -> int | None:
        return broker_of(storm, _host(session)) if is_registration(operations) else None

    return await next_of(storm.before_write, registers)


async def _next_first_order(storm: Ground) -> int | None:
    """Return a broker that has just registered when its first LeaderAndIsr request arrives."""
    broker_id = await _next_registration(storm)
    if broker_id is None:
        return None

    def is_order(arrival: Arrival) -> bool | None:
        is_there = arrival.target == host_name(broker_id) and arrival.target_port == CONTROL_PORT
        return True if is_there and request_key(arrival.data) == LEADER_AND_ISR.key else None

    return broker_id if await next_of(storm.simulation.network.taps, is_order) else None


async def _killed(storm: Ground, broker_id: int) -> None:
    storm.take_down(broker_id, storm.cluster.kill_broker)


async def _without_power(storm: Ground, broker_id: int) -> None:
    """Cut its power if no other broker is damaged. It may be damaged itself: no other data is lost then."""
    if storm.damaged <= {broker_id}:
        storm.cut_power([broker_id])
    else:
        storm.take_down(broker_id, storm.cluster.kill_broker)


async def _disconnected(storm: Ground, broker_id: int) -> None:
    for other in storm.cluster.broker_ids:
        if other != broker_id:
            storm.simulation.network.reset(host_name(broker_id), host_name(other))


async def _without_zookeeper(storm: Ground, broker_id: int) -> None:
    with storm.cut_from_zookeeper(host_name(broker_id)):
        await asyncio.sleep(_absence_s(storm))


async def _isolated(storm: Ground, broker_id: int) -> None:
    host = host_name(broker_id)
    storm.simulation.network.unreachable(host, True)
    try:
        with storm.cut_from_zookeeper(host):
            await asyncio.sleep(_absence_s(storm))
    finally:
        storm.simulation.network.unreachable(host, False)


# --- ZooKeeper is gone before it has answered ----------------------------------------------------------------------


async def registration_unanswered(storm: Ground) -> None:
    """Carry out or lose a broker's registration, without a reply, and cut ZooKeeper off for this broker or for all,
    possibly again each time that the broker has reconnected."""
    dice = storm.dice
    storm.event("registration unanswered: laid")
    if dice.random() < 0.8 and (victim := storm.some_broker()) is not None:
        if dice.random() < 0.3:
            storm.simulation.zookeeper.expire(host_name(victim))
        else:
            storm.take_down(victim, storm.cluster.kill_broker, restart_after_s=0.0)
    refusal = _LOST if dice.random() < 0.2 else None
    for_everybody = dice.random() < 0.2
    zookeeper = storm.simulation.zookeeper

    def strike(session: VirtualSession, operations: Sequence[Operation]) -> str | None:
        host = _host(session)
        if not is_registration(operations) or broker_of(storm, host) is None:
            return None
        zookeeper.cut(host)
        return host

    host = await next_of(storm.before_write, strike, refusal)
    if host is None:
        return
    storm.event("registration unanswered: struck")
    absences = [_absence_s(storm) for _ in range(dice.choice([1, 2]))]
    if dice.random() < 0.5:  # the session survives, and the registration's orders are pending
        absences = [0.95 * storm.session_timeout_s] * dice.choice([2, 3])
    storm.count(
        "registration unanswered",
        f"{host}, {'lost' if refusal else 'carried out'}; ZooKeeper is gone for {_in_words(absences)}"
        + ", after a moment for all brokers" * for_everybody,
    )
    try:
        if for_everybody:
            await asyncio.sleep(dice.uniform(0.002, 0.1))  # the other brokers know by then
            zookeeper.stop()
        await asyncio.sleep(absences[0])
    finally:
        zookeeper.uncut(host)
        if for_everybody:
            zookeeper.start()
    for absence_s in absences[1:]:
        if not await next_of(zookeeper.reconnected, lambda session: _host(session) == host or None):
            return
        await asyncio.sleep(dice.choice([0.0, 0.0, 0.001]))  # its first request is under way
        with storm.cut_from_zookeeper(host):
            await asyncio.sleep(absence_s)


async def isr_write_unanswered(storm: Ground) -> None:
    """Carry out or lose a leader's ISR write, without a reply, and cut the leader off from ZooKeeper for a while."""
    dice = storm.dice
    storm.event("ISR write unanswered: laid")
    refusal = _LOST if dice.random() < 0.5 else None
    states = {znodes.state_path(partition) for partition in storm.partitions}

    def strike(session: VirtualSession, operations: Sequence[Operation]) -> str | None:
        # A leader writes alone; the controller checks its epoch in the same transaction.
        match operations:
            case [SetData(path, _, _)] if path in states:
                host = _host(session)
                storm.simulation.zookeeper.cut(host)
                return host
        return None

    host = await next_of(storm.before_write, strike, refusal)
    if host is None:
        return
    absence_s = _absence_s(storm)
    storm.event("ISR write unanswered: struck")
    storm.count(
        "ISR write unanswered",
        f"{host}, {'lost' if refusal else 'carried out'}; ZooKeeper is gone for {absence_s:.1f} s",
    )
    try:
        await asyncio.sleep(absence_s)
    finally:
        storm.simulation.zookeeper.uncut(host)


def is_registration(operations: Sequence[Operation]) -> bool:
    return any(isinstance(o, Create) and o.path.startswith(f"{znodes.BROKER_IDS}/") for o in operations)


def _host(session: VirtualSession) -> str:
    return session.owner.partition("#")[0]


def _absence_s(storm: Ground) -> float:
    """Draw an absence from a moment to longer than a session; often slightly shorter, so that the session survives."""
    timeout_s = storm.session_timeout_s
    return storm.dice.choice([0.1, 0.5, 0.8 * timeout_s, 0.95 * timeout_s, 1.3 * timeout_s])


def _in_words(absences: list[float]) -> str:
    return " and ".join(f"{absence_s:.1f} s" for absence_s in absences)
