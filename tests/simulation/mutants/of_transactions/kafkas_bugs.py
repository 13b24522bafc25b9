"""Planted bugs of transactions, most of which Kafka had: of coordinators, the logs of partitions, and readers."""

from __future__ import annotations

from typing import Any

from minibroker.broker.replication import questions
from minibroker.broker.replication.reading import Reader
from minibroker.broker.storage import producer_state
from minibroker.broker.storage.log import Log
from minibroker.broker.storage.producer_state import NO_OFFSET, InvalidSnapshot, ProducerState
from minibroker.broker.transactions import transaction
from minibroker.broker.transactions.coordinator import TransactionCoordinator
from minibroker.broker.transactions.markers import MarkerSender
from minibroker.broker.transactions.states import TransactionState
from minibroker.broker.transactions.transaction import ProducerIdAndEpoch, Transaction
from tests.simulation.mutants.planting import Patches, mutant

# --- Coordinators ---------------------------------------------------------------------------------------------------


@mutant("KAFKA-17754", "the end of a transaction does not raise the epoch, so a late EndTxn ends the next transaction")
def end_keeps_the_epoch(patches: Patches) -> None:
    @patches.instead_of(transaction, "end")
    def end(original: Any, known: Any, producer: Any, *, raises_epoch: bool, **rest: Any) -> Any:
        return original(known, producer, raises_epoch=False, **rest)


@mutant("KAFKA-9600", "EndTxn checks neither producer id nor epoch, so a zombie ends the transaction of its successor")
def ends_are_believed(patches: Patches) -> None:
    @patches.instead_of(transaction, "end")
    def end(original: Any, known: Any, producer: Any, **rest: Any) -> Any:
        present = producer if known is None else ProducerIdAndEpoch(known.producer_id, known.producer_epoch)
        return original(known, present, **rest)


@mutant("KAFKA-6119", "an abort by time-out does not raise the epoch: its producer sends and commits the rest")
def time_outs_do_not_fence(patches: Patches) -> None:
    @patches.instead_of(transaction, "time_out")
    def time_out(original: Any, known: Transaction, fresh_id: Any, now_ms: int) -> Transaction:
        return known._to(TransactionState.PREPARE_ABORT, now_ms)


@mutant("a zombie producer", "InitProducerId grants the epoch that the earlier producer of the transactional id has")
def successors_do_not_fence(patches: Patches) -> None:
    @patches.instead_of(transaction, "initialize")
    def initialize(original: Any, known: Any, *arguments: Any) -> Any:
        if known is None or known.state not in (TransactionState.EMPTY, TransactionState.COMPLETE_COMMIT):
            return original(known, *arguments)
        return known


@mutant("acknowledged too early", "the outcome of a transaction counts, and is answered, before the log has it")
def outcomes_are_told_at_once(patches: Patches) -> None:
    @patches.instead_of(TransactionCoordinator, "_write")
    async def _write(original: Any, self: Any, term: Any, new: Transaction) -> Any:
        if not new.is_ending:
            return await original(self, term, new)
        self._start_task(original(self, term, new), "the outcome is written later")
        return new


@mutant("KAFKA-6683", "a coordinator's state changes before the append of its record, which may fail")
def decided_before_it_is_written(patches: Patches) -> None:
    @patches.instead_of(TransactionCoordinator, "_write")
    async def _write(original: Any, self: Any, term: Any, new: Transaction) -> Any:
        coordinated = term.ids.get(new.transactional_id)
        if coordinated is not None:
            coordinated.current = new
        return await original(self, term, new)


@mutant("a decision that nobody tells", "a new coordinator does not tell partitions the outcomes that the last one had")
def outcomes_are_told_by_one_coordinator(patches: Patches) -> None:
    @patches.instead_of(TransactionCoordinator, "loaded")
    def loaded(original: Any, self: Any, term: Any) -> None:
        pass


@mutant(
    "a decision that nobody tells", "a transaction is complete when its markers are sent, not when they are written"
)
def markers_are_sent_once(patches: Patches) -> None:
    @patches.instead_of(MarkerSender, "send")
    def send(original: Any, self: Any, term: Any, of: Transaction, decision: int, written: Any) -> None:
        original(self, term, of, decision, lambda: None)
        written()


# --- Logs -----------------------------------------------------------------------------------------------------------


@mutant("KAFKA-9144", "a log forgets a producer early, even with an open transaction and the epoch of its coordinator")
def producers_are_forgotten_early(patches: Patches) -> None:
    @patches.instead_of(ProducerState, "forget_unseen_for")
    def forget_unseen_for(original: Any, self: Any, seconds: float) -> None:
        self._producers = {i: p for i, p in self._producers.items() if p.last_seen_s >= self._time_s - 1.0}


@mutant("a deposed coordinator", "a log accepts the marker of an earlier coordinator")
def markers_of_any_coordinator(patches: Patches) -> None:
    @patches.instead_of(ProducerState, "check_marker")
    def check_marker(original: Any, self: Any, producer_id: int, epoch: int, marker: Any, **rest: Any) -> None:
        original(self, producer_id, epoch, marker._replace(coordinator_epoch=1 << 30), **rest)


@mutant("KAFKA-12153", "a truncation leaves the transactions open whose records it cuts")
def cut_transactions_stay_open(patches: Patches) -> None:
    @patches.instead_of(Log, "_rewind_producers")
    def _rewind_producers(original: Any, self: Any, offset: int) -> None:
        cut = {-1 - i: first for i, first in self._producers._open.items() if first >= offset}
        original(self, offset)
        self._producers._open |= cut  # under ids that no marker has


@mutant("KAFKA-6683", "a marker ends the transaction in a log's producer state before its append, which may fail")
def ended_before_the_marker_is_written(patches: Patches) -> None:
    early: dict[tuple[int, int], int] = {}

    @patches.instead_of(ProducerState, "check_marker")
    def check_marker(original: Any, self: Any, producer_id: int, *arguments: Any, **rest: Any) -> None:
        original(self, producer_id, *arguments, **rest)
        if producer_id in self._open:
            early[id(self), producer_id] = self._open.pop(producer_id)
            self._producers[producer_id] = self._producers[producer_id]._replace(open_since=NO_OFFSET)

    @patches.instead_of(ProducerState, "update")
    def update(original: Any, self: Any, header: Any, first_offset: int, now_ms: int, marker: Any = None) -> Any:
        began = early.pop((id(self), header.producer_id), None) if marker is not None else None
        if began is not None:
            self._open[header.producer_id] = began
            self._producers[header.producer_id] = self._producers[header.producer_id]._replace(open_since=began)
        return original(self, header, first_offset, now_ms, marker)


@mutant("KAFKA-9892", "a snapshot of producers that a power cut has left torn is taken for one without producers")
def torn_snapshots_are_believed(patches: Patches) -> None:
    @patches.instead_of(producer_state, "decode_snapshot")
    def decode_snapshot(original: Any, data: bytes) -> Any:
        try:
            return original(data)
        except InvalidSnapshot:
            return []


@mutant("a late marker", "a marker that was appended before ends the next transaction of a client that keeps its epoch")
def late_markers_are_appended(patches: Patches) -> None:
    @patches.instead_of(Log, "has_marker")
    def has_marker(original: Any, self: Any, *marker: Any) -> bool:
        return False


# --- Readers --------------------------------------------------------------------------------------------------------


@mutant("KAFKA-5376", "an answer to a fetch that had to wait lists no aborted transactions")
def waiting_fetches_list_no_aborts(patches: Patches) -> None:
    @patches.instead_of(Reader, "fetch")
    def fetch(original: Any, self: Any, request: Any, respond: Any, *rest: Any) -> Any:
        is_waiting = False

        def answer(found: Any) -> None:
            if is_waiting:
                for _, response in found:
                    response.aborted_transactions = []
            respond(found)

        waiting = original(self, request, answer, *rest)
        is_waiting = True
        return waiting


@mutant("KAFKA-14402", "a leader appends transactional batches without asking whether the transaction is ongoing")
def transactions_are_not_verified(patches: Patches) -> None:
    @patches.instead_of(questions, "needs_question")
    def needs_question(original: Any, log: Any, records: Any) -> bool:
        return False
