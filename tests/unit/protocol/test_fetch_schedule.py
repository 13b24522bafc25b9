from __future__ import annotations

from minibroker.protocol.fetch_schedule import (
    MANY_REQUESTS,
    MAX_PIECES,
    MAX_QUIET_PIECES,
    MAX_REQUESTS,
    PARTITIONS_PER_REQUEST,
    SHORT_WAIT_MS,
    SHORT_WAITS,
    Piece,
    cut,
    cut_by_size,
    follower_pace,
    follower_wait_ms,
    most_in_a_request,
    schedule,
    size_after,
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
        [Piece(piece, most) for piece in pieces],
        outstanding=outstanding,
        elapsed_ms=elapsed_ms,
        longest_wait_ms=longest_wait_ms,
    )
    assert [planned.piece.partitions for planned in scheduled] == pieces[: len(scheduled)]
    return [planned.wait_ms for planned in scheduled]


def test_partitions_are_cut_into_pieces_that_name_each_once() -> None:
    assert cut(range(7), 3) == [(range(3), 3), (range(3, 6), 3), (range(6, 7), 3)]
    assert cut([], 3) == []


def test_quiet_partitions_share_a_piece_with_those_that_want_one_of_the_same_size() -> None:
    pieces = cut_by_size(range(9), lambda partition: 4 if partition % 3 else 2)
    assert pieces == [([0, 3], 2), ([6], 2), ([1, 2, 4, 5], 4), ([7, 8], 4)]


def test_records_make_requests_smaller_and_their_absence_makes_them_larger() -> None:
    def after(size: int, *ends: bool, waited_longest: bool = True, partitions: int = 300) -> int:
        for was_ended_by_records in ends:
            size = size_after(
                size,
                was_ended_by_records=was_ended_by_records,
                waited_longest=waited_longest,
                partitions=partitions,
            )
        return size

    assert after(100, True) == 50
    assert after(100, *[True] * 20) == after(19, True) == 19 == -(-300 // MAX_QUIET_PIECES)
    assert after(100, *[True] * 20, partitions=10) == 1
    assert after(100, True, partitions=30) == 15, "there are no more than 30 to name"
    assert after(19, False) == 38
    assert after(100, False) == after(19, *[False] * 20) == PARTITIONS_PER_REQUEST
    assert after(50, False, waited_longest=False) == 50, "a remainder, which has yet to be joined"
    for partitions in (1, 500, 10_000):
        least = after(100, *[True] * 20, partitions=partitions)
        assert len(cut(range(partitions), least)) <= MAX_QUIET_PIECES <= MAX_REQUESTS // 2


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
    planned = schedule(
        [Piece(small, 100), Piece(whole, 100)], outstanding=MANY_REQUESTS, elapsed_ms=0, longest_wait_ms=LONGEST_MS
    )
    assert [part.is_longest for part in planned] == [False, True]
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
