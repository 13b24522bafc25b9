"""Planted bugs of our own producer's transactions."""

from __future__ import annotations

from typing import Any

from minibroker.client.group.commits import GroupMetadata
from minibroker.client.group.session import GroupSession
from minibroker.client.processor import Processor
from minibroker.client.producing.accumulator import Accumulator
from minibroker.client.producing.batch import BatchVerdict, Identity
from minibroker.client.transactions.states import TransactionState, TransactionStates
from minibroker.client.transactions.transactions import Transactions
from tests.simulation.mutants.planting import Patches, mutant


@mutant("lost write", "a commit that is not answered in time counts as aborted, and is aborted")
def unanswered_commit_is_aborted(patches: Patches) -> None:
    @patches.instead_of(TransactionStates, "unanswered")
    def unanswered(original: Any, self: TransactionStates) -> None:
        if self.state is TransactionState.COMMITTING:
            self.aborts()


@mutant("lost write", "a transaction is committed although one of its records has failed")
def failed_record_does_not_abort(patches: Patches) -> None:
    @patches.instead_of(Transactions, "failed")
    def failed(original: Any, self: Transactions, *rest: Any) -> None:
        pass


@mutant("torn transaction", "a transaction is committed although `send` has raised an error within its block")
def record_not_sent_does_not_abort(patches: Patches) -> None:
    @patches.instead_of(Transactions, "not_sent")
    def not_sent(original: Any, self: Transactions, *rest: Any) -> None:
        pass


@mutant("torn transaction", "a transaction is committed without offsets whose call was not awaited")
def offsets_not_awaited_are_forgotten(patches: Patches) -> None:
    @patches.instead_of(Transactions, "offsets_called")
    def offsets_called(original: Any, self: Transactions, *rest: Any) -> None:
        pass


@mutant("lost write", "a transaction is committed before its records are acknowledged")
def commit_does_not_flush(patches: Patches) -> None:
    @patches.instead_of(Transactions, "__init__")
    def init(original: Any, self: Transactions, *rest: Any, **named: Any) -> None:
        async def flush() -> None:
            pass

        original(self, *rest, **{**named, "flush": flush})


@mutant("KAFKA-17754", "the producer keeps its epoch from one transaction to the next")
def epoch_not_taken_over(patches: Patches) -> None:
    @patches.instead_of(TransactionStates, "ended")
    def ended(original: Any, self: TransactionStates, outcome: Any, granted: Identity | None) -> None:
        original(self, outcome, None)


@mutant("KAFKA-5376", "records of an aborted transaction that were not sent go into the next one")
def aborted_records_stay_queued(patches: Patches) -> None:
    @patches.instead_of(Accumulator, "abandon")
    def abandon(original: Any, self: Accumulator, error: Any) -> None:
        pass


@mutant("KIP-360", "a transactional producer raises its own epoch, so a batch is outside of the transaction's end")
def producer_raises_its_epoch(patches: Patches) -> None:
    @patches.instead_of(Accumulator, "judge")
    def judge(original: Any, self: Accumulator, *rest: Any) -> BatchVerdict:
        self._is_transactional, was = False, self._is_transactional
        try:
            verdict: BatchVerdict = original(self, *rest)
        finally:
            self._is_transactional = was
        return verdict


@mutant("KIP-588", "a producer is fenced for good if its transaction took too long")
def time_out_is_fatal(patches: Patches) -> None:
    @patches.instead_of(TransactionStates, "failed")
    def failed(original: Any, self: TransactionStates, error: Any, where: str) -> Any:
        counts = original(self, error, where)
        if self._must_recover:
            self.aborts()
            self.fenced(error.code)
        return counts


@mutant("KIP-447", "offsets of a transaction do not name the member that sends them")
def offsets_without_membership(patches: Patches) -> None:
    @patches.instead_of(Transactions, "_commit_offsets")
    async def commit_offsets(original: Any, self: Transactions, offsets: Any, group: GroupMetadata) -> Any:
        return await original(self, offsets, GroupMetadata(group.group))


@mutant("KIP-447", "a consumer that has lost its partitions names its group without a membership")
def lost_member_names_its_group(patches: Patches) -> None:
    @patches.instead_of(GroupSession, "metadata")
    def metadata(original: Any, self: GroupSession) -> Any:
        membership = self.commits.committer.membership()
        return GroupMetadata(*membership) if membership is not None else GroupMetadata(self.commits.group)


@mutant("torn transaction", "records that are sent while the block ends join the transaction unnoticed")
def records_join_while_the_block_ends(patches: Patches) -> None:
    @patches.instead_of(Accumulator, "close_batches")
    def close_batches(original: Any, self: Accumulator) -> None:
        pass


@mutant("lost write", "a fenced producer's commit counts as aborted although an attempt may have been carried out")
def fenced_commit_counts_as_aborted(patches: Patches) -> None:
    @patches.instead_of(TransactionStates, "answered")
    def answered(original: Any, self: TransactionStates, step: Any, code: Any, granted: Any, in_doubt: bool) -> None:
        self._may_be_committed = False
        original(self, step, code, granted, False)


@mutant("KAFKA-17582", "after an aborted transaction a processor goes on behind its records, which are skipped")
def aborted_records_are_skipped(patches: Patches) -> None:
    @patches.instead_of(Processor, "_go_back")
    async def _go_back(original: Any, self: Any, batch: Any) -> None:
        """Do nothing."""
