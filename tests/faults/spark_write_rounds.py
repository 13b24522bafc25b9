"""Kill processes of a streaming query that writes with `exactlyOnce`, and of its cluster, under load; then compare the
topic that it writes with the one that it reads.

    python -m tests.faults.spark_write_rounds --rounds 3 [--modes local,cluster] [--kinds driver,worker,...]

The rounds and options are those of `spark_rounds`. Two more kinds are the coordinator of the driver's transactions, and
that of the group that has its records. At the end, `exceptAll` over the records that read_committed returns finds no
difference in either direction.
"""

from __future__ import annotations

import json
from pathlib import Path

from minibroker.deploy.local.who import CoordinatorOf, LeaderOf, Who
from minibroker.protocol.model import TRANSACTIONS_TOPIC, TopicPartition, internal_partition
from minibroker.spark_jobs.jobs import prepare_session
from minibroker.spark_jobs.session import spark_session
from minibroker.spark_jobs.source.exactly_once import NAME_PREFIX
from tests.faults.spark_rounds import KINDS, Rounds, Row, main
from tests.spark.exactness import differences
from tests.spark.standalone import SETTINGS

STATE_PARTITIONS = 50
"""The brokers' default (`transaction.state.log.num.partitions`)."""


class WriteRounds(Rounds):
    """`output` is the query's checkpoint."""

    @property
    def copy(self) -> str:
        return f"{self.topic}-copy"

    def topics(self) -> list[str]:
        return [self.topic, self.copy]

    def arguments(self) -> list[str]:
        where = (self._brokers.bootstrap(), self.topic, self.copy, str(self.output))
        return ["tests.spark.copy_stream", *where, "--rows-per-batch", "5000", "--master", self._master]

    def member(self) -> Who:
        name = NAME_PREFIX + str(json.loads((self.output / "metadata").read_text())["id"])
        match self._kind:
            case "leader":
                return LeaderOf(TopicPartition(self.copy, 0))
            case "transaction-coordinator":
                partition = internal_partition(name, STATE_PARTITIONS)
                return LeaderOf(TopicPartition(TRANSACTIONS_TOPIC, partition))
            case "group-coordinator":
                return CoordinatorOf(name)
        return super().member()

    def _batches(self) -> int:
        """Return the batches that Spark has recorded as done."""
        return max((int(file.name) + 1 for file in self._files("commits")), default=0)

    def _files(self, directory: str) -> list[Path]:
        return list((self.output / directory).glob("[0-9]*"))

    def _has(self, ends: dict[str, int]) -> bool:
        done = self._batches()
        if not done:
            return False
        lines = (self.output / "offsets" / str(done - 1)).read_text().splitlines()
        offsets = json.loads(lines[-1]).get(self.topic, {"offsets": {}})["offsets"]
        return all(offsets.get(partition, 0) >= offset for partition, offset in ends.items())

    def judged(self, rounds: int) -> Row:
        settings = SETTINGS | {"spark.ui.showConsoleProgress": "false"}
        session = spark_session("judge", master="local[2]", settings=settings)
        prepare_session(session)
        read, written = (
            session.read.format("minibroker")
            .options(**{"bootstrap.servers": self._brokers.bootstrap(), "isolation.level": "read_committed"})
            .option("subscribe", topic)
            .load()
            .select("key", "value")
            for topic in self.topics()
        )
        missing, extra = differences(written, read)
        restarts = self.job.starts - 1
        return Row(self.mode, self._kind, rounds, restarts, read.count(), self._batches(), missing, extra)


if __name__ == "__main__":
    main(WriteRounds, (*KINDS, "transaction-coordinator", "group-coordinator"), __doc__)
