"""A cluster inside a test: real brokers and a real ZooKeeper on this machine, and their faults as methods.

    async with LocalCluster(brokers=3, topics=["orders"]) as cluster:
        ...  # any client, with cluster.bootstrap_servers
        await cluster.kill("leader:orders-0")

`SyncLocalCluster` is the same for tests without asyncio. pytest finds the fixtures `minibroker_cluster`,
`minibroker_async_cluster` and `minibroker_topic` by itself. How-tos are in docs/testing.md.
"""

from minibroker.deploy.errors import LaunchError, LaunchTimedOut
from minibroker.deploy.local.who import Member
from minibroker.deploy.testing.cluster import LocalCluster, SyncLocalCluster

__all__ = ["LaunchError", "LaunchTimedOut", "LocalCluster", "Member", "SyncLocalCluster"]
