from minibroker.deploy.trials.trial import Acknowledged, ReadBack, judge_trial, longest_gap


def acks(*pairs: tuple[int, int]) -> list[Acknowledged]:
    return [Acknowledged(number, offset, float(number)) for number, offset in pairs]


def found(*pairs: tuple[int, int]) -> list[ReadBack]:
    return [ReadBack(offset, number) for offset, number in pairs]


def test_all_that_was_acknowledged_and_read_once_in_order_is_flawless() -> None:
    verdict = judge_trial(
        4, 1, {0: acks((0, 0), (2, 1)), 1: acks((1, 0))}, {0: found((0, 0), (1, 2)), 1: found((0, 1), (1, 3))}
    )
    assert verdict.flawless
    assert (verdict.sent, verdict.acknowledged, verdict.failed, verdict.read_back) == (4, 3, 1, 4)


def test_an_acknowledged_record_that_nobody_reads_is_lost() -> None:
    assert judge_trial(2, 0, {0: acks((0, 0), (1, 1))}, {0: found((0, 0))}).lost == 1
    assert judge_trial(1, 0, {0: acks((0, 0))}, {}).lost == 1


def test_a_record_at_another_offset_than_the_acknowledged_one_is_lost() -> None:
    assert judge_trial(1, 0, {0: acks((0, 5))}, {0: found((6, 0))}).lost == 1


def test_a_record_that_was_acknowledged_without_an_offset_is_looked_for_by_its_content() -> None:
    acknowledged = {0: acks((0, 0), (1, -1), (2, 2))}
    assert judge_trial(3, 0, acknowledged, {0: found((0, 0), (1, 1), (2, 2))}).flawless
    assert judge_trial(3, 0, acknowledged, {0: found((0, 0), (2, 2))}).lost == 1
    altered = [ReadBack(0, 0), ReadBack(1, 1, is_intact=False), ReadBack(2, 2)]
    assert judge_trial(3, 0, acknowledged, {0: altered}).lost == 1


def test_one_record_at_two_offsets_is_a_duplicate_and_not_out_of_order() -> None:
    verdict = judge_trial(2, 0, {0: acks((0, 0), (1, 1))}, {0: found((0, 0), (1, 1), (2, 0))})
    assert (verdict.lost, verdict.duplicated, verdict.out_of_order) == (0, 1, 0)


def test_a_number_behind_a_higher_one_is_out_of_order() -> None:
    verdict = judge_trial(3, 0, {}, {0: found((0, 0), (1, 2), (2, 1))})
    assert (verdict.duplicated, verdict.out_of_order) == (0, 1)


def test_an_acknowledged_record_whose_value_changed_is_lost_and_altered() -> None:
    verdict = judge_trial(2, 0, {0: acks((0, 0), (1, 1))}, {0: [ReadBack(0, 0), ReadBack(1, 1, is_intact=False)]})
    assert (verdict.lost, verdict.altered, verdict.flawless) == (1, 1, False)


def test_a_record_that_nobody_sent_is_altered_and_nothing_is_lost_by_it() -> None:
    verdict = judge_trial(1, 0, {0: acks((0, 0))}, {0: [ReadBack(0, 0), ReadBack(1, 7, is_intact=False)]})
    assert (verdict.lost, verdict.altered, verdict.flawless) == (0, 1, False)


def test_the_longest_gap_is_of_one_partition_and_overlaps_the_interval() -> None:
    acknowledged = {
        0: [Acknowledged(n, n, at) for n, at in enumerate((0.0, 1.0, 4.0, 4.5))],
        1: [Acknowledged(n, n, at) for n, at in enumerate((0.0, 2.0, 2.1, 9.0))],
    }
    assert longest_gap(acknowledged, 0.5, 2.05)[:2] == (0, 3.0)
    assert longest_gap(acknowledged, 3.0, 5.0)[:2] == (1, 6.9)
