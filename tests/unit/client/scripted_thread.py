"""A ScriptedCluster for tests of blocking clients: it answers in its own thread while the test waits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread
from typing import TypeVar

from tests.unit.client.scripted_broker import ScriptedCluster

T = TypeVar("T")


class ClusterThread:
    """A cluster in a thread. Read `cluster` directly, and change it through `do`."""

    def __init__(self, cluster: ScriptedCluster, loop: asyncio.AbstractEventLoop) -> None:
        self.cluster = cluster
        self._loop = loop

    @property
    def bootstrap(self) -> str:
        return self.cluster.bootstrap

    def do(self, work: Callable[[], T]) -> T:
        """Run the function in the cluster's loop."""

        async def run() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    def values(self, topic: str = "orders", partition: int = 0) -> list[bytes | None]:
        return self.do(lambda: self.cluster.log(topic, partition).values())


@contextmanager
def scripted_cluster(brokers: int = 1, partitions: int = 1) -> Iterator[ClusterThread]:
    """Run a cluster that has a topic "orders"."""
    started: Future[ClusterThread] = Future()
    stop = asyncio.Event()

    async def main() -> None:
        async with ScriptedCluster(brokers) as cluster:
            cluster.add_topic("orders", partitions)
            started.set_result(ClusterThread(cluster, asyncio.get_running_loop()))
            await stop.wait()

    thread = Thread(target=asyncio.run, args=(main(),), name="scripted cluster")
    thread.start()
    running = started.result(60)
    try:
        yield running
    finally:
        running.do(stop.set)
        thread.join(60)
        assert not thread.is_alive()
