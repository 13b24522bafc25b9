"""Elections of preferred leaders by an administrator, through a request or a znode.

They may lose nothing, whatever else goes wrong, so that the storm's checks need not know of them. The znode must be
gone when the cluster is whole again."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from minibroker.client.admin import Admin
from minibroker.protocol import znodes
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition
from tests.simulation.storms.ground import Ground

_NONSENSE = [
    b"",
    b'{"version":1,"partitions":[{"topic":"none","partition":-1}]}',
    b'{"version":1,"partitions":"all"}',
]


async def preferred_election(storm: Ground) -> None:
    """Request one or three elections, each of some or all partitions."""
    for _ in range(storm.dice.choice([1, 1, 3])):
        partitions = list(storm.leadership.values())
        partitions = storm.dice.sample(partitions, storm.dice.randint(1, len(partitions)))
        named = [partition for partition, _ in partitions]
        if storm.dice.random() < 0.5:
            _by_znode(storm, named)
        else:
            await _by_request(storm, None if storm.dice.random() < 0.3 else named)
        await asyncio.sleep(storm.dice.choice([0.0, 0.1, 2.0]))


def _by_znode(storm: Ground, partitions: list[TopicPartition]) -> None:
    data = znodes.encode_preferred_election(partitions)
    if storm.dice.random() < 0.1:
        data = storm.dice.choice(_NONSENSE)
    storm.count("preferred election", f"by znode: {data.decode()}")
    storm.event("preferred election by znode")
    storm.simulation.zookeeper.make(znodes.PREFERRED_REPLICA_ELECTION, data)


async def _by_request(storm: Ground, partitions: list[TopicPartition] | None) -> None:
    named = "all" if partitions is None else " ".join(map(str, partitions))
    storm.count("preferred election", f"by request: {named}")
    storm.event("preferred election by request")
    world = storm.cluster.client("elector")

    async def elect() -> None:
        with suppress(MinibrokerError):  # some elections are impossible now
            async with Admin(storm.cluster.bootstrap, world=world) as admin:
                await admin.elect_leaders("preferred", partitions)

    await storm.run_client(world, elect(), within_s=20)
