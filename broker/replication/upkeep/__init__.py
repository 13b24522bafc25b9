"""Background work on replicas: retention, compaction, moves, healing, checkpoints."""

from collections.abc import Awaitable, Callable, Sequence

from minibroker.broker.replication.partition import Partition

WithPresentSettings = Callable[[Sequence[Partition]], Awaitable[list[Partition]]]
"""Reads settings again before records are deleted by them: `ReplicaSettings.with_present_settings`."""
