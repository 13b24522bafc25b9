"""Unread answers of all clients together."""

from __future__ import annotations

import asyncio

from minibroker.broker.network.unsent import LOOK_INTERVAL_S, STALLED_S, UnsentAnswers
from tests.running import run_by
from tests.unit.broker.scheduling.test_purgatory import VirtualLoop, run


class Client:
    def __init__(self) -> None:
        self.unsent = 0
        self.dropped = False

    def unsent_bytes(self) -> int:
        return self.unsent

    def drop_unsent(self, reason: str) -> None:
        assert "read nothing" in reason
        self.unsent, self.dropped = 0, True


def answer(answers: UnsentAnswers, client: Client, size: int) -> None:
    def give() -> None:
        client.unsent += size
        answers.given(size)

    answers.in_turn(give)


@run_by(run)
async def test_answers_wait_while_too_much_is_unread_and_stalled_clients_make_room(loop: VirtualLoop, /) -> None:
    deaf, innocent = [Client() for _ in range(20)], Client()
    answers = UnsentAnswers(100, lambda: [*deaf, innocent], loop.time)
    for client in deaf:
        answer(answers, client, 20)
    assert sum(client.unsent for client in deaf) == 120
    answer(answers, innocent, 20)
    assert innocent.unsent == 0
    await asyncio.sleep(STALLED_S / 2)
    assert not any(client.dropped for client in deaf)
    most = 0
    while not innocent.unsent:
        await asyncio.sleep(LOOK_INTERVAL_S)
        most = max(most, sum(client.unsent for client in deaf))
    assert most <= 120
    assert loop.elapsed_ms() < 6_000
    answers.close()


@run_by(run)
async def test_a_slow_client_that_reads_is_kept_and_the_line_moves_when_it_has_read(loop: VirtualLoop, /) -> None:
    slow, other = Client(), Client()
    answers = UnsentAnswers(100, lambda: [slow, other], loop.time)
    answer(answers, slow, 150)
    answer(answers, other, 10)
    for _ in range(4):
        await asyncio.sleep(STALLED_S * 0.9)
        slow.unsent -= 10
    assert (slow.dropped, other.unsent) == (False, 0)
    slow.unsent = 0
    await asyncio.sleep(2 * LOOK_INTERVAL_S)
    assert other.unsent == 10
    answers.close()


@run_by(run)
async def test_below_the_limit_nothing_is_measured(loop: VirtualLoop, /) -> None:
    client = Client()
    measured: list[Client] = []

    def receivers() -> list[Client]:
        measured.append(client)
        return [client]

    answers = UnsentAnswers(100, receivers, loop.time)
    for _ in range(5):
        answer(answers, client, 20)
        client.unsent = 0
    assert not measured
    answer(answers, client, 20)
    assert len(measured) == 1
    answers.close()
