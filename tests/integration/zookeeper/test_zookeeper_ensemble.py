"""Three ZooKeeper servers whose leader is killed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import pytest
from kazoo.client import KazooClient

from minibroker.client.admin import Admin
from minibroker.deploy.local.local_cluster import LocalCluster
from minibroker.deploy.trials.trial import Trial
from minibroker.protocol import znodes
from tests.integration.zookeeper.zookeeper_process import zookeeper_ensemble

DEADLINE_S = 60.0
CHROOT = "/clusters/orders"
"""A path that does not exist when the test starts, with two missing levels."""
ACKNOWLEDGED = 500


@pytest.mark.slow
def test_no_record_is_lost_when_the_ensembles_leader_dies_under_load_and_the_chroot_is_created(
    local_cluster: Callable[..., LocalCluster],
) -> None:
    with zookeeper_ensemble() as ensemble:
        cluster = local_cluster(brokers=3, zookeeper=ensemble.addresses + CHROOT)

        async def scenario() -> None:
            async with Admin(cluster.bootstrap()) as admin:
                await admin.create_topic("orders", partitions=3, replication_factor=3)
                values = (b"line %d" % number for number in itertools.count())
                trial = Trial(cluster.bootstrap(), "orders", 3, values, records_per_second=1_000)
                async with trial.sending():
                    await trial.wait_for_acknowledgements(ACKNOWLEDGED, DEADLINE_S)
                    await asyncio.to_thread(lambda: ensemble.kill(ensemble.leader()))
                    await trial.wait_for_acknowledgements(ACKNOWLEDGED, DEADLINE_S)
                    # The controller stays, or another one is elected; both are right.
                    await admin.create_topic("later", partitions=3, replication_factor=3)
                    await trial.wait_for_acknowledgements(ACKNOWLEDGED, DEADLINE_S)
                verdict = await trial.verdict()
            assert not trial.failures
            assert verdict.flawless, verdict

        asyncio.run(scenario())
        client = KazooClient(hosts=ensemble.addresses)
        client.start()
        try:
            assert set(client.get_children("/")) == {"clusters", "zookeeper"}
            assert client.exists(CHROOT + znodes.topic_path("later")) is not None
        finally:
            client.stop()
            client.close()
