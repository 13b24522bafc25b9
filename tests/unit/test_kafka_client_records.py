"""How the matrix of Kafka's clients reads their output."""

from __future__ import annotations

from tests.kafka_clients.records import Read, full_record, problems_of_group, problems_of_reading


def read_of(number: int, offset: int) -> Read:
    return Read(number % 3, offset, 1_000 + number, full_record(number))


def lines_of(read: list[Read]) -> list[list[str]]:
    return [["rec", *map(str, (each.partition, each.offset, each.timestamp_ms)), *each.content] for each in read]


def test_a_whole_reading_has_no_problems() -> None:
    read = [read_of(number, number // 3) for number in range(30)]

    assert problems_of_reading({n: (n % 3, n // 3) for n in range(30)}, read, full_record, 1_000) == []
    assert problems_of_group(range(30), [lines_of(read[:12]), lines_of(read[12:])], full_record) == []


def test_what_is_lost_duplicated_reordered_or_altered_is_named() -> None:
    acknowledged: dict[int, tuple[int, int] | None] = {3: (0, 0), 6: (0, 1), 9: None}
    whole = [read_of(3, 0), read_of(6, 1), read_of(9, 2)]
    altered = whole[1]._replace(content=full_record(4))

    assert problems_of_reading(acknowledged, whole[:2], full_record) == ["lost 9"]
    assert problems_of_reading(acknowledged, [*whole, read_of(9, 3)], full_record) == ["duplicated 9", "reordered 9"]
    assert (
        problems_of_reading(acknowledged, [read_of(9, 0), read_of(3, 1), read_of(6, 2)], full_record)[0]
        == "reordered 3"
    )
    assert problems_of_reading(acknowledged, whole, full_record, 999)[0].startswith("altered")
    assert "lost 6" in problems_of_reading(acknowledged, [whole[0], altered, whole[2]], full_record)


def test_a_member_may_read_again_only_what_it_is_assigned_again() -> None:
    lines = lines_of([read_of(3, 0), read_of(6, 1)])
    again = [*lines, ["revoked", "0"], ["assigned", "0"], *lines]

    assert problems_of_group([3, 6], [again], full_record) == []
    assert problems_of_group([3, 6], [[*lines, *lines]], full_record) == ["reordered 3"]
    assert problems_of_group([3, 6, 9], [lines], full_record) == ["lost 9"]
