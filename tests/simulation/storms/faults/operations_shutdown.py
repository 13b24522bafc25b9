"""Controlled shutdowns of one or two brokers that are disturbed half-way: at the controller, at a stopping broker, or
between the two.
"""

from __future__ import annotations

import asyncio

from minibroker.deploy.simulator.cluster import host_name
from tests.simulation.storms.ground import Ground

_STRIKES = (
    "nothing",
    "controller killed",
    "controller paused",
    "controller's session expired",
    "broker killed",
    "broker's session expired",
    "connection reset",
)


async def controlled_shutdown(storm: Ground) -> None:
    """Stop brokers in good order, strike after some milliseconds, and restart them at once or soon after."""
    dice = storm.dice
    idle = storm.idle_brokers()
    if not idle:
        return
    victims = dice.sample(idle, min(len(idle), dice.choice([1, 1, 1, 2])))
    strike = dice.choice(_STRIKES)
    storm.count("controlled shutdown", f"brokers {victims}; {strike}")
    restart_after_s = dice.choice([0.0, 1.0, 5.0]) * dice.random()
    stops = [asyncio.create_task(_stop(storm, victim, restart_after_s)) for victim in victims]
    try:
        await asyncio.sleep(dice.choice([0.001, 0.005, 0.02, 0.1, 1.0]) * dice.random())
        if strike == "broker killed":
            stops[0].cancel()
        await _strike(storm, strike, victims[0])
        await asyncio.wait(stops)
    finally:
        for stop in stops:
            stop.cancel()
        await asyncio.wait(stops)


async def _stop(storm: Ground, broker_id: int, restart_after_s: float) -> None:
    with storm.hold(broker_id):
        await storm.stop(broker_id, restart_after_s=restart_after_s)


async def _strike(storm: Ground, strike: str, victim: int) -> None:
    cluster, simulation = storm.cluster, storm.simulation
    controllers = [b for b in cluster.active_controllers() if b in storm.idle_brokers()]
    if strike == "broker's session expired":
        simulation.zookeeper.expire(host_name(victim))
    for controller in controllers:
        if strike == "controller killed":
            storm.take_down(controller, cluster.kill_broker)
        elif strike == "controller's session expired":
            simulation.zookeeper.expire(host_name(controller))
        elif strike == "connection reset":
            simulation.network.reset(host_name(controller), host_name(victim))
        elif strike == "controller paused":
            with storm.paused(controller):
                await asyncio.sleep(storm.dice.choice([0.3, 3.0, 8.0]))
