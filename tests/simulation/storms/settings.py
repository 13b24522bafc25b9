"""The size and the settings that a seed draws for its cluster."""

from __future__ import annotations

from random import Random

RETENTION_MINUTES = 1
"""How long committed offsets are kept in half of the storms."""
ENDLESS_RETENTION_MINUTES = 10_000_000
"""Longer than any clock jump of a storm."""

_BROKERS = [2, 3, 3, 3, 3, 3, 3, 4]
_REBALANCE_INTERVALS_S = [300, 300, 30, 5, 2]


def draw_cluster(seed: int, dice: Random) -> tuple[int, dict[str, str]]:
    """Return the number of brokers and their settings."""
    settings = _draw_broker_settings(dice)
    brokers = dice.choice(_BROKERS)
    interval_s = Random(f"{seed} rebalance").choice(_REBALANCE_INTERVALS_S)
    settings |= {"leader.imbalance.check.interval.seconds": str(interval_s)}
    settings |= _draw_coordinator_settings(Random(f"{seed} coordinators"), brokers)
    settings |= _draw_retention_settings(Random(f"{seed} offsets retention"))
    return brokers, settings | _draw_transaction_settings(Random(f"{seed} settings of transactions"), brokers)


def _draw_broker_settings(dice: Random) -> dict[str, str]:
    """Draw timeouts far below their defaults, and sizes at which segments roll and fetches are cut."""
    lag_ms = dice.choice([1_000, 3_000, 10_000])
    return {
        "zookeeper.session.timeout.ms": str(dice.choice([1_500, 3_000, 6_000])),
        "zookeeper.connection.timeout.ms": str(dice.choice([2_000, 6_000])),
        "broker.crash.detection.ms": str(dice.choice([100, 500, 1_500])),
        "replica.lag.time.max.ms": str(lag_ms),
        "replica.fetch.wait.max.ms": str(dice.choice([50, 200, 500])),
        "replica.fetch.max.bytes": str(dice.choice([500, 20_000, 1_048_576])),
        "replica.fetch.backoff.ms": str(dice.choice([20, 100, 1_000])),
        "replica.socket.timeout.ms": str(dice.choice([1_000, 5_000, 30_000])),
        "replica.high.watermark.checkpoint.interval.ms": str(dice.choice([100, 1_000, 5_000])),
        "log.flush.offset.checkpoint.interval.ms": str(dice.choice([200, 2_000, 60_000])),
        "log.segment.bytes": str(dice.choice([4_000, 30_000, 1_000_000])),
        "log.index.interval.bytes": str(dice.choice([1, 500, 4_096])),
        "log.retention.check.interval.ms": str(dice.choice([100, 1_000, 5_000])),
        "log.cleaner.backoff.ms": str(dice.choice([100, 1_000, 5_000])),
        "num.network.threads": str(dice.randint(1, 3)),
        "num.io.threads": str(dice.choice([1, 2, 8])),
    }


def _draw_coordinator_settings(dice: Random, brokers: int) -> dict[str, str]:
    """Draw few partitions of `__consumer_offsets`, so that groups share a coordinator, and short times."""
    return {
        "offsets.topic.num.partitions": str(dice.choice([1, 1, 2, 3])),
        "offsets.topic.replication.factor": str(brokers),
        "offsets.topic.segment.bytes": str(dice.choice([2_000, 20_000, 1_000_000])),
        "group.initial.rebalance.delay.ms": str(dice.choice([0, 100, 1_000])),
        "group.min.session.timeout.ms": "500",
    }


def _draw_transaction_settings(dice: Random, brokers: int) -> dict[str, str]:
    """Draw few partitions of `__transaction_state`, so that transactional ids share a coordinator, and short times."""
    return {
        "transaction.state.log.num.partitions": str(dice.choice([1, 2, 3])),
        "transaction.state.log.replication.factor": str(brokers),
        "transaction.state.log.segment.bytes": str(dice.choice([2_000, 20_000, 1_000_000])),
        "transaction.abort.timed.out.transaction.cleanup.interval.ms": str(dice.choice([200, 2_000, 10_000])),
    }


def _draw_retention_settings(dice: Random) -> dict[str, str]:
    """Draw how long offsets are kept, and how often coordinators look for expired ones."""
    minutes = dice.choice([RETENTION_MINUTES, ENDLESS_RETENTION_MINUTES])
    return {
        "offsets.retention.minutes": str(minutes),
        "offsets.retention.check.interval.ms": str(dice.choice([200, 1_000, 5_000])),
    }
