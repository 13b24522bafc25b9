"""Runs scenarios on real processes of this machine, with the cluster of `minibroker.testing`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from minibroker.deploy.local.who import Member
from minibroker.deploy.scenarios.director import Outcome, play
from minibroker.deploy.scenarios.model import Scenario
from minibroker.deploy.scenarios.stage import cluster_settings
from minibroker.deploy.scenarios.stages.real import RealStage
from minibroker.deploy.scenarios.words import Action
from minibroker.deploy.testing.cluster import LocalCluster


async def play_live(scenario: Scenario) -> Outcome:
    """Play a scenario on a cluster of its own, which is started and removed. Raises ScenarioError, LaunchError."""
    scenario.check_runner("live")
    async with LocalCluster(scenario.brokers, settings=cluster_settings(scenario)) as cluster:
        return await play_on(scenario, cluster)


async def play_on(scenario: Scenario, cluster: LocalCluster) -> Outcome:
    """Play a scenario on a running cluster that has its number of brokers and its settings. Topics of the scenario must
    not exist. Raises ScenarioError."""
    scenario.check_runner("live")
    stage = LiveStage(scenario, cluster)
    try:
        return await play(scenario, stage, None)
    finally:
        await stage.end()


class LiveStage(RealStage):
    """`minibroker.deploy.scenarios.stage.Stage` on processes."""

    runner = "live"

    def __init__(self, scenario: Scenario, cluster: LocalCluster) -> None:
        super().__init__(scenario, cluster.bootstrap_servers)
        self._cluster = cluster

    async def act(self, action: Action, members: Sequence[Member]) -> None:
        if action.verb == "heal":
            await self._cluster.heal()
            return
        if action.verb == "slow disk of by":
            await asyncio.gather(*(self._cluster.slow_disk(who, action.seconds()) for who in members))
            return
        if action.verb in ("cut from", "cut packets from to"):
            await self._cluster.cut(*members, one_way=action.verb != "cut from")
            return
        if action.verb == "slow network by":
            await self._cluster.slow_network("all", action.seconds())
            return
        if action.verb == "move clock of by":
            await asyncio.gather(*(self._cluster.move_clock(who, action.seconds()) for who in members))
            return
        act = {
            "kill": self._cluster.kill,
            "stop": self._cluster.stop,
            "start": self._cluster.start,
            "pause": self._cluster.pause,
            "resume": self._cluster.resume,
            "isolate": self._cluster.isolate,
            "drop connections of": self._cluster.drop_connections,
            "fill disk of": self._cluster.fill_disk,
            "break disk of": self._cluster.break_disk,
            "mend disk of": self._cluster.mend_disk,
        }[action.verb]
        # One call for all: brokers start side by side, and a first one might wait for the others.
        whole = set(members) == set(self.broker_ids) and len(members) > 1
        await asyncio.gather(*(act(who) for who in (["all"] if whole else members)))

    async def restore(self) -> None:
        await self._cluster.restore()
