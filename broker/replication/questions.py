"""Questions to a transaction's coordinator, and what makes their answers void (Kafka's VerificationGuard, KIP-890).

The problem: a transactional batch may arrive after its transaction has ended. If the leader appended it, it would open
a transaction that no marker ever ends, or become part of the producer's next one (KAFKA-14402).

The choice: the leader appends the first batch of a transaction only after the coordinator has confirmed that the
partition belongs to it. The marker may arrive between the coordinator's answer and the append. So the leader takes a
question before it asks, and appends with it. A marker of the producer in this log voids its questions, and so does the
end of this leadership: afterwards, another leader may have appended the marker. (A leader's log is never cut.)
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from minibroker.broker.storage.log import Log
from minibroker.protocol.errors import BrokerError, ErrorCode
from minibroker.protocol.messages import Buffer
from minibroker.protocol.records import CorruptRecord, parse_header
from minibroker.protocol.records.header import is_transactional


class Question:
    """Whether a partition belongs to the producer's ongoing transaction. Hold it until the batch is appended."""

    __slots__ = ("__weakref__",)


WAIVED = Question()
"""In place of a question: no coordinator was asked, since transaction.partition.verification.enable is false."""


class Questions:
    """The open questions about one log. One that nobody holds any more is forgotten."""

    def __init__(self) -> None:
        self._open: WeakValueDictionary[int, Question] | None = None
        """By producer id. Made when it is needed: most logs have no transactions."""

    def take(self, producer_id: int) -> Question:
        """Return a question for a batch of the producer, before its coordinator is asked."""
        if self._open is None:
            self._open = WeakValueDictionary()
        question = self._open.get(producer_id)
        if question is None:
            question = self._open[producer_id] = Question()
        return question

    def void(self, producer_id: int) -> None:
        if self._open is not None:
            self._open.pop(producer_id, None)

    def void_all(self) -> None:
        self._open = None

    def stands(self, producer_id: int, question: Question) -> bool:
        """Whether nothing has made the answer to the question void."""
        return self._open is not None and self._open.get(producer_id) is question

    def check(self, log: Log, records: Buffer, question: Question | None) -> None:
        """T5. Check that a leader may append the records to `log`; `question` is the one whose answer confirmed it.
        Raises BrokerError NOT_ENOUGH_REPLICAS, which every producer retries; then the coordinator is asked anew."""
        if question is WAIVED or not needs_question(log, records):
            return
        producer_id = parse_header(records).producer_id
        if question is None or not self.stands(producer_id, question):
            raise BrokerError(
                ErrorCode.NOT_ENOUGH_REPLICAS,
                f"{log.partition}: while this batch waited for its transaction's coordinator, a transaction of "
                f"producer {producer_id} ended here, or the leader changed: send it again",
            )


def needs_question(log: Log, records: Buffer) -> bool:
    """Whether the batch opens a transaction in the log, so the coordinator must be asked first. A repetition does not:
    it is in the log."""
    if not is_transactional(records):
        return False
    try:
        header = parse_header(records)
    except CorruptRecord:
        return False  # the append reports it
    is_open = log.has_open_transaction(header.producer_id, header.producer_epoch)
    return not is_open and not log.repeats(records)
