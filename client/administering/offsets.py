"""Offsets of partitions: ListOffsets at the leaders, until every partition has its answer or its error."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

from minibroker.client.administering.requests import AdminRequests
from minibroker.client.cluster.offsets import Found, OffsetAndTimestamp, ask_leader, ask_leaders
from minibroker.client.errors import PartialFailure
from minibroker.protocol.errors import BrokerError, InvalidMessage, MinibrokerError, NetworkError
from minibroker.protocol.model import TopicPartition


class OffsetErrors(PartialFailure[TopicPartition, OffsetAndTimestamp | None]):
    """The offsets of some partitions were not found. `errors` and `results` are by partition."""

    def __init__(
        self,
        errors: Mapping[TopicPartition, MinibrokerError],
        results: Mapping[TopicPartition, OffsetAndTimestamp | None] = MappingProxyType({}),
    ) -> None:
        super().__init__(dict(sorted(errors.items())), results)


async def list_offsets(
    requests: AdminRequests, timestamps: Mapping[TopicPartition, int], isolation_level: int, timeout_s: float | None
) -> dict[TopicPartition, OffsetAndTimestamp | None]:
    """See `Admin.list_offsets`. `timeout_s`: None is the client's."""
    runtime = requests.runtime
    found: dict[TopicPartition, Found] = {}
    errors: dict[TopicPartition, MinibrokerError] = {}
    try:
        with runtime.metadata.wanted(partition.topic for partition in timestamps):
            await ask_leaders(
                runtime,
                timestamps,
                requests.timeout_s if timeout_s is None else timeout_s,
                found,
                errors,
                partial(ask_leader, isolation_level=isolation_level),
                "finding offsets",
                each_by_itself=True,
                waits_for_unknown=False,
            )
    except (BrokerError, NetworkError, InvalidMessage) as error:  # time is up
        errors |= {each: error for each in timestamps if each not in found and each not in errors}
    results = {partition: found[partition].result for partition in timestamps if partition in found}
    if errors:
        raise OffsetErrors(errors, results)
    return results
