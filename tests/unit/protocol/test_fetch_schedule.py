from __future__ import annotations

from minibroker.protocol.fetch_schedule import (
    MANY_REQUESTS,
    MAX_PIECES,
    MAX_REQUESTS,
    PARTITIONS_PER_REQUEST,
    SHORT_WAIT_MS,
    SHORT_WAITS,
    cut,
    follower_pace,
    follower_wait_ms,
    most_in_a_request,
    schedule,
)

LONGEST_MS = 500


def waits(
    pieces: list[list[int]],
    outstanding: int = 0,
    elapsed_ms: int = 0,
    longest_wait_ms: int = LONGEST_MS,
    most: int = 100,
) -> list[int]:
    scheduled = schedule(
        pieces, most=most, outstanding=outstanding, elapsed_ms=elapsed_ms, longest_wait_ms=longest_wait_ms
    )
    assert [piece for piece, _ in scheduled] == pieces[: len(scheduled)]
    return [wait_ms for _, wait_ms in scheduled]


def test_partitions_are_cut_into_pieces_that_name_each_once() -> None:
    assert cut(range(7), 3) == [range(3), range(3, 6), range(6, 7)]
    assert cut([], 3) == []


def test_very_many_partitions_are_cut_into_a_few_large_pieces() -> None:
    assert most_in_a_request(1) == PARTITIONS_PER_REQUEST
    for partitions in (801, 5_000, 99_999):
        assert len(cut(range(partitions), most_in_a_request(partitions))) == MAX_PIECES


def test_requests_that_are_sent_at_different_times_run_out_together() -> None:
    ends = {elapsed_ms + waits([[1]], elapsed_ms=elapsed_ms)[0] for elapsed_ms in range(1_000, 1_500, 7)}
    assert ends == {1_500}
    assert waits([[1]], elapsed_ms=1_500) == [LONGEST_MS]


def test_where_there_are_many_requests_one_comes_back_the_earlier_the_smaller_it_is() -> None:
    small, half, whole = [1], list(range(50)), list(range(100))
    shortest_ms = 32  # a sixteenth, in whole milliseconds: a half of it would be below SHORT_WAIT_MS
    assert waits([small, whole], outstanding=MANY_REQUESTS - 1) == [LONGEST_MS, LONGEST_MS]
    assert waits([small, half, whole], outstanding=MANY_REQUESTS) == [shortest_ms, LONGEST_MS // 2, LONGEST_MS]
    assert waits([small, small], outstanding=MANY_REQUESTS - 1) == [LONGEST_MS, shortest_ms]
    assert waits([small], outstanding=MANY_REQUESTS, longest_wait_ms=5) == [5]
    assert waits([small], outstanding=MANY_REQUESTS, longest_wait_ms=3_200) == [3_200 // SHORT_WAITS]
    for size in range(1, 100):
        assert waits([list(range(size))], MANY_REQUESTS, longest_wait_ms=1_000)[0] >= max(10 * size, SHORT_WAIT_MS)


def test_whatever_comes_back_meets_all_that_are_smaller() -> None:
    def moments(size: int) -> set[int]:
        asked_for = list(range(size))
        return {at_ms + waits([asked_for], MANY_REQUESTS, at_ms, 3_500)[0] for at_ms in range(0, 7_000, 3)}

    assert moments(100) == {3_500, 7_000}
    assert moments(100) < moments(50) < moments(25) < moments(12) < moments(6) < moments(3)


def test_what_is_too_much_for_a_leader_is_left_for_later() -> None:
    assert len(waits([[1], [2], [3]], outstanding=MAX_REQUESTS - 2)) == 2
    assert waits([[1]], outstanding=MAX_REQUESTS) == []
    assert waits([[1]], outstanding=MAX_REQUESTS + 1) == []


def test_without_a_longest_wait_nothing_waits() -> None:
    assert waits([[1], [2]], elapsed_ms=17, longest_wait_ms=0) == [0, 0]


def test_a_follower_of_many_partitions_waits_in_proportion_but_less_than_the_lag_limit() -> None:
    assert [follower_pace(partitions) for partitions in (0, 1, 500, 501, 5_000)] == [1, 1, 1, 2, 10]
    assert [follower_wait_ms(500, partitions, 30_000) for partitions in (1, 500, 501, 2_000)] == [
        500,
        500,
        1_000,
        2_000,
    ]
    assert follower_wait_ms(500, 100_000, 30_000) == 3_000
    assert follower_wait_ms(500, 100_000, 1_000) == 500, "as long as the setting allows in any case"
