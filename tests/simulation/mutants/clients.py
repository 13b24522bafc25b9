"""Planted bugs of the client library: producers that write twice or not at all, consumers that skip."""

from __future__ import annotations

from typing import Any

from client import accumulator
from client.accumulator import Accumulator, Verdict
from client.fetcher import Fetcher
from protocol.errors import ERRORS, ErrorCode
from protocol.messages import LATEST_TIMESTAMP
from tests.simulation.mutants.planting import Patches, mutant


@mutant("KIP-98", "a producer that got no answer sends the batch again with new sequence numbers")
def retried_with_new_numbers(patches: Patches) -> None:
    @patches.instead_of(Accumulator, "retry")
    def retry(original: Any, self: Accumulator, batch: Any, retry_at: float) -> None:
        batch.number_anew()
        original(self, batch, retry_at)


@mutant("KIP-98", "a producer numbers nothing, so that each repetition is a new batch to the broker")
def producer_not_idempotent(patches: Patches) -> None:
    @patches.instead_of(Accumulator, "__init__")
    def init(original: Any, self: Accumulator, *, is_idempotent: bool, **named: Any) -> None:
        original(self, is_idempotent=False, **named)


@mutant("acknowledged too early", "a producer takes a connection that broke for an acknowledgement")
def no_answer_is_a_good_answer(patches: Patches) -> None:
    @patches.instead_of(accumulator, "judge")
    def judge(original: Any, code: ErrorCode, **named: Any) -> Verdict:
        return original(ErrorCode.NONE if code is ErrorCode.NETWORK_EXCEPTION else code, **named)  # type: ignore[no-any-return]


@mutant("poll skip", "a consumer that finds the leader moved goes on at the end of the log")
def position_lost_with_the_leader(patches: Patches) -> None:
    @patches.instead_of(Fetcher, "_failed")
    def failed(original: Any, self: Fetcher, state: Any, code: ErrorCode, *rest: Any) -> None:
        original(self, state, code, *rest)
        if ERRORS[code].refresh_metadata and not state.fetched:
            self.move(state, None, LATEST_TIMESTAMP)
