"""Planted bugs of read-process-write."""

from __future__ import annotations

from typing import Any

from minibroker.client.consumer import Consumer
from minibroker.client.group.commits import GroupMetadata
from minibroker.client.transactions.transaction import Transaction
from tests.simulation.mutants.planting import Patches, mutant


@mutant("duplicate", "a processor repeats a batch whose commit was not answered, without asking for the outcome")
def unanswered_commits_are_repeated(patches: Patches) -> None:
    @patches.instead_of(Transaction, "was_committed")
    async def was_committed(original: Any, self: Transaction) -> bool:
        return False


@mutant("KIP-447", "a transaction commits offsets of its consumer's group without its generation")
def offsets_without_a_generation(patches: Patches) -> None:
    @patches.instead_of(Consumer, "group_metadata")
    def group_metadata(original: Any, self: Consumer) -> GroupMetadata:
        assert self._session is not None
        return GroupMetadata(self._session.commits.group)
