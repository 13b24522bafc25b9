"""The blocking processor. The asynchronous one runs in the background, and the user's function in the thread that calls
`run`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal, Unpack

from minibroker.client.errors import Closed, InvalidSetting
from minibroker.client.fetching.records import Record
from minibroker.client.other_names import knows_other_names
from minibroker.client.processing.results import Process as AsyncProcess
from minibroker.client.processing.results import ProducerRecord, check_process, listed
from minibroker.client.processor import Processor as AsyncProcessor
from minibroker.client.security import Security
from minibroker.client.serializers import DeserializerChoice, SerializerChoice
from minibroker.client.settings import IsolationLevel
from minibroker.client.sync.errands import Errands
from minibroker.client.sync.facade import Facade

Process = Callable[[list[Record]], Iterable[ProducerRecord] | None]
"""A function or a generator function. None: there are no results."""


class Processor(Facade[AsyncProcessor]):
    """Consumes topics in a group, passes the records to a function, and produces its results, exactly once:

        with Processor("host:9092", topics=["orders"], group="billing", transactional_id="billing-1",
                       process=bill) as processor:
            processor.run()

    Guarantees, settings and errors are those of `minibroker.Processor`. `process` is called in the thread that calls
    `run`, and returns a list of ProducerRecord, or yields them. Heartbeats continue meanwhile. If `run` is interrupted
    (Ctrl-C), the open transaction is aborted. The constructor raises InvalidSetting.
    """

    _noun = "processor"

    @knows_other_names
    def __init__(
        self,
        bootstrap: str | Sequence[str],
        *,
        process: Process,
        group: str,
        topics: Sequence[str] | None = None,
        pattern: str | re.Pattern[str] | None = None,
        transactional_id: str | None = None,
        group_instance_id: str | None = None,
        isolation_level: IsolationLevel = "read_committed",
        auto_offset_reset: Literal["earliest", "latest", "none"] = "earliest",
        max_poll_records: int = 500,
        commit_interval_ms: float = 0,
        transaction_timeout_ms: float = 60_000,
        key_deserializer: DeserializerChoice = "bytes",
        value_deserializer: DeserializerChoice = "bytes",
        key_serializer: SerializerChoice = "bytes",
        value_serializer: SerializerChoice = "bytes",
        client_id: str = "minibroker-processor",
        request_timeout_ms: float = 30_000,
        retry_backoff_ms: float = 100,
        metadata_max_age_ms: float = 30_000,
        consumer_settings: Mapping[str, Any] | None = None,
        producer_settings: Mapping[str, Any] | None = None,
        **security: Unpack[Security],
    ) -> None:
        check_process(process)
        if inspect.iscoroutinefunction(process) or inspect.isasyncgenfunction(process):
            rule = "it is called, not awaited: define it by `def`, or use minibroker.Processor"
            raise InvalidSetting("process", process, rule)
        self._errands = Errands()
        client = AsyncProcessor(
            bootstrap,
            process=_in_callers_thread(process, self._errands),
            group=group,
            topics=topics,
            pattern=pattern,
            transactional_id=transactional_id,
            group_instance_id=group_instance_id,
            isolation_level=isolation_level,
            auto_offset_reset=auto_offset_reset,
            max_poll_records=max_poll_records,
            commit_interval_ms=commit_interval_ms,
            transaction_timeout_ms=transaction_timeout_ms,
            key_deserializer=key_deserializer,
            value_deserializer=value_deserializer,
            key_serializer=key_serializer,
            value_serializer=value_serializer,
            client_id=client_id,
            request_timeout_ms=request_timeout_ms,
            retry_backoff_ms=retry_backoff_ms,
            metadata_max_age_ms=metadata_max_age_ms,
            consumer_settings=consumer_settings,
            producer_settings=producer_settings,
            **security,
        )
        super().__init__(client)
        self._errands.background = self._background

    def run(self) -> None:
        """Process records until `stop` is called, by `process` or by another thread. Raises the exceptions of
        `process`, Closed, ForkedClient, ProducerFenced, and errors of the consumer and producer that do not pass."""
        self._call(self._client.run, self._errands.serve)

    def stop(self) -> None:
        """Let `run` return once the records in hand are processed and committed. If their transaction fails, they are
        repeated first, for about `transaction_timeout_ms`, unless the group has given their partitions to another
        member. Returns at once. May be called by `process`, by another thread, and by a signal handler."""
        if self._state == "running":
            with suppress(Closed):
                self._background.soon(self._client.stop)

    def _was_forked(self) -> object:
        self._client._consumer._state = self._client._producer._state = "closed"
        return super()._was_forked()


def _in_callers_thread(process: Process, errands: Errands) -> AsyncProcess:
    async def run(records: list[Record]) -> list[ProducerRecord]:
        returned: list[list[ProducerRecord]] = []
        await errands.run(lambda: returned.append(listed(process(records))))
        if not returned:
            raise Closed("the processor was closed before its function was called")
        return returned[0]

    return run
