"""Planted bugs of transactions in the logs that a broker leads: what is stable, markers, late batches."""

from __future__ import annotations

from typing import Any

from minibroker.broker.replication import appending, isolation
from minibroker.broker.replication.appending import Appender
from minibroker.broker.replication.isolation import FetchIsolation
from minibroker.broker.replication.partition import Partition
from minibroker.broker.replication.questions import Questions
from minibroker.broker.storage.producer_state import ProducerState
from minibroker.broker.transactions.coordinator import TransactionCoordinator
from minibroker.broker.transactions.markers import MarkerSender
from minibroker.broker.transactions.verification import TransactionVerifier
from minibroker.client.cli import hanging
from minibroker.protocol.errors import ErrorCode
from tests.simulation.mutants.planting import Patches, mutant

# --- How far consumers read ---------------------------------------------------------------------------------------


@mutant("read_committed", "read_committed consumers read up to the high watermark")
def last_stable_offset_ignored(patches: Patches) -> None:
    @patches.instead_of(Partition, "end_for")
    def end_for(original: Any, self: Partition, level: FetchIsolation) -> Any:
        return original(self, FetchIsolation.HIGH_WATERMARK if level is FetchIsolation.TXN_COMMITTED else level)


@mutant("KAFKA-9807", "a transaction counts as decided before the high watermark has reached its marker")
def unreplicated_marker_decides(patches: Patches) -> None:
    @patches.instead_of(ProducerState, "last_stable_offset")
    def last_stable_offset(original: Any, self: ProducerState, high_watermark: int) -> int:
        return min(next(iter(self._open.values()), high_watermark), high_watermark)


@mutant("read_committed", "an answer to a read_committed consumer lists no aborted transactions")
def aborted_transactions_not_listed(patches: Patches) -> None:
    @patches.instead_of(isolation, "aborted_in")
    def aborted_in(original: Any, *rest: Any) -> Any:
        return []


# --- Markers ------------------------------------------------------------------------------------------------------


@mutant("atomicity", "a marker is answered before it is replicated")
def marker_answered_before_replicated(patches: Patches) -> None:
    @patches.instead_of(Appender, "_append_marker")
    def append_marker(original: Any, self: Appender, *rest: Any) -> Any:
        status = original(self, *rest)
        status.pending = False
        return status


@mutant("KIP-1228", "a late repetition of a marker ends the producer's next transaction")
def late_marker_ends_the_next_transaction(patches: Patches) -> None:
    @patches.instead_of(ProducerState, "check_marker")
    def check_marker(original: Any, self: ProducerState, *rest: Any, raises_epoch: bool) -> None:
        original(self, *rest, raises_epoch=False)


# --- Late batches -------------------------------------------------------------------------------------------------


@mutant("KAFKA-14402", "a leader appends the first batch of a transaction without asking the coordinator")
def verification_skipped(patches: Patches) -> None:
    @patches.instead_of(TransactionVerifier, "is_waived")
    def is_waived(original: Any, self: TransactionVerifier, *, adds: bool) -> bool:
        return True


@mutant("order", "a batch is appended although the coordinator has not confirmed an earlier one of its producer")
def unconfirmed_batch_not_remembered(patches: Patches) -> None:
    @patches.instead_of(Appender, "note_refused")
    def note_refused(original: Any, self: Appender, *rest: Any) -> None:
        """Do nothing."""


@mutant("KIP-890", "a marker that arrives between the coordinator's answer and the append does not void the answer")
def marker_does_not_void_the_question(patches: Patches) -> None:
    @patches.instead_of(Questions, "void")
    def void(original: Any, self: Questions, producer_id: int) -> None:
        """Do nothing."""


@mutant("KIP-890", "the coordinator's answer is still used after another leadership")
def leadership_does_not_void_questions(patches: Patches) -> None:
    @patches.instead_of(Questions, "void_all")
    def void_all(original: Any, self: Questions) -> None:
        """Do nothing."""


# --- The coordinator ----------------------------------------------------------------------------------------------


@mutant("zombies", "a coordinator that does not know that it is deposed answers from its memory")
def answers_are_not_confirmed(patches: Patches) -> None:
    @patches.instead_of(TransactionCoordinator, "_confirm")
    async def confirm(original: Any, self: TransactionCoordinator, term: Any) -> ErrorCode:
        return ErrorCode.NONE


@mutant("atomicity", "the next coordinator does not finish what the previous one has decided")
def outcomes_are_not_told_again(patches: Patches) -> None:
    @patches.instead_of(TransactionCoordinator, "loaded")
    def loaded(original: Any, self: TransactionCoordinator, term: Any) -> None:
        """Do nothing."""


@mutant("atomicity", "an outcome is written as told to all partitions before the markers are written")
def completed_before_the_markers(patches: Patches) -> None:
    @patches.instead_of(MarkerSender, "send")
    def send(original: Any, self: MarkerSender, term: Any, transaction: Any, written: Any) -> None:
        original(self, term, transaction, lambda: None)
        written()


# --- Administrators -----------------------------------------------------------------------------------------------


@mutant("KIP-664", "an administrator's abort ends whatever transaction of the producer is open when it arrives")
def late_aborts_end_the_next_transaction(patches: Patches) -> None:
    @patches.instead_of(appending, "_has_ended")
    def has_ended(original: Any, *rest: Any) -> bool:
        return False


@mutant("KIP-664", "an open transaction counts as hanging although its coordinator knows it")
def known_transactions_hang(patches: Patches) -> None:
    @patches.instead_of(hanging, "knows")
    def knows(original: Any, *rest: Any) -> bool:
        return False


@mutant("zombies", "an InitProducerId that arrives late fences the producer that has sent it")
def late_start_fences_its_own_producer(patches: Patches) -> None:
    @patches.instead_of(TransactionCoordinator, "initialize")
    async def initialize(original: Any, self: TransactionCoordinator, *rest: Any) -> Any:
        return await original(self, *rest[:3])


@mutant("strangers", "an administrator's marker has any epochs")
def administrators_epochs_are_not_checked(patches: Patches) -> None:
    @patches.instead_of(ProducerState, "check_epochs_of_open_transaction")
    def check(original: Any, self: ProducerState, *rest: Any) -> None:
        """Do nothing."""


@mutant("hanging transactions", "a topic that the coordinator has not heard of counts as deleted")
def unheard_of_topics_are_deleted(patches: Patches) -> None:
    @patches.instead_of(MarkerSender, "_settle_deleted")
    async def settle(original: Any, self: MarkerSender, ended: Any, partitions: Any) -> None:
        for topic_partition in partitions:
            self._settle(ended, topic_partition)


@mutant("power cuts", "a transaction of an earlier epoch that is open in the log becomes part of the next one")
def earlier_epochs_join_the_next_transaction(patches: Patches) -> None:
    @patches.instead_of(Appender, "_abort_earlier_epoch")
    def abort(original: Any, self: Appender, *rest: Any) -> None:
        """Do nothing."""
