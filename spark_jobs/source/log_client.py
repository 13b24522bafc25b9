"""The driver's requests to the cluster, as blocking calls.

Spark calls a data source from threads without asyncio, so a client has an event loop of its own, which runs during its
calls.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping

from minibroker.client.cluster.offsets import Known, OffsetAndTimestamp
from minibroker.client.security import Security
from minibroker.protocol.model import NO_EPOCH, TopicPartition
from minibroker.protocol.records import READ_UNCOMMITTED
from minibroker.protocol.world import World
from minibroker.spark_jobs.source.connecting import FIRST_CONTACT_PATIENCE_S, PATIENCE_S, connect, new_cluster
from minibroker.spark_jobs.source.look_ups import LookUps, Topics, offset_of
from minibroker.spark_jobs.source.offsets import Offsets, TopicOffsets
from minibroker.spark_jobs.source.options import Subscription


class LogClient:
    """`LookUps` as blocking calls, which raise the same errors. `close` it, or use it in `with`."""

    def __init__(
        self,
        bootstrap: str,
        client_id: str,
        *,
        isolation_level: int = READ_UNCOMMITTED,
        patience_s: float = PATIENCE_S,
        world: World | None = None,
        security: Security | None = None,
    ) -> None:
        self._runner = asyncio.Runner()
        try:
            self._cluster = new_cluster(bootstrap, client_id, world, security)
            self._look_ups = LookUps(self._cluster, patience_s, isolation_level)
            self._runner.run(connect(self._cluster, min(patience_s, FIRST_CONTACT_PATIENCE_S)))
        except BaseException:
            self._runner.close()
            raise

    def __enter__(self) -> LogClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        try:
            self._runner.run(self._cluster.close())
        finally:
            self._runner.close()

    def monotonic(self) -> float:
        return self._cluster.clock.monotonic()

    def pause(self, seconds: float) -> None:
        """Sleep, with the event loop running."""
        self._runner.run(asyncio.sleep(seconds))

    def topics(self, subscription: Subscription, *, is_lenient: bool = False) -> Topics:
        return self._runner.run(self._look_ups.topics(subscription, is_lenient=is_lenient))

    def offsets(
        self, timestamps: Mapping[TopicPartition, int], known: Mapping[TopicPartition, Known] | None = None
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Look up offsets by timestamp, EARLIEST or LATEST (see `LookUps`). None: no record is as recent."""
        found = self._runner.run(self._look_ups.offsets(timestamps, known)) if timestamps else {}
        return {partition: answer.result for partition, answer in found.items()}

    def known_offsets(
        self, timestamps: Mapping[TopicPartition, int], known: Mapping[TopicPartition, Known] | None = None
    ) -> dict[TopicPartition, int]:
        """Look up EARLIEST and LATEST, which every partition has."""
        return {
            partition: 0 if found is None else found.offset
            for partition, found in self.offsets(timestamps, known).items()
        }

    def ends(
        self, known: Mapping[TopicPartition, Known], at_least: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int]:
        found = self._runner.run(self._look_ups.ends(known, at_least)) if known else {}
        return {partition: offset_of(end) for partition, end in found.items()}

    def latest(
        self, subscription: Subscription, *, is_lenient: bool = False, since: Offsets | None = None
    ) -> dict[str, TopicOffsets]:
        return self._runner.run(self._look_ups.latest(subscription, is_lenient=is_lenient, since=since))

    def leader_epochs(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the epochs of the leaders known now; they may have been deposed."""
        leaders = {partition: self._cluster.metadata.cluster.leader(*partition) for partition in partitions}
        return {partition: NO_EPOCH if leader is None else leader.epoch for partition, leader in leaders.items()}
