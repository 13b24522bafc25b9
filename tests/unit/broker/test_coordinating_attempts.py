"""Which numbered attempts of a client are late: a pure decision."""

from __future__ import annotations

from minibroker.broker.coordinating.attempts import LatestAttempts
from minibroker.protocol.errors import ErrorCode
from minibroker.protocol.messages import groups as g
from minibroker.protocol.messages.fields import Attempt
from tests.groups_support import GROUP, CoordinatedGroups, with_groups
from tests.running import run_by

E = ErrorCode


def attempt(number: int, client: str = "one", epoch: int = -1) -> Attempt:
    return Attempt(client, number, epoch)


def test_an_attempt_below_the_latest_of_its_client_is_late() -> None:
    latest = LatestAttempts(0)
    assert [latest.take(attempt(number), 5) for number in (3, 4, 3, 4, 5, 1)] == [
        *(E.NONE, E.NONE, E.REQUEST_TIMED_OUT),
        *(E.NONE, E.NONE, E.REQUEST_TIMED_OUT),
    ]


def test_each_client_has_its_own_count() -> None:
    latest = LatestAttempts(0)
    assert latest.take(attempt(7, "one"), 5) == latest.take(attempt(1, "other"), 5) == E.NONE


def test_an_attempt_meant_for_an_earlier_term_is_refused_and_not_recorded() -> None:
    latest = LatestAttempts(5)
    assert latest.take(attempt(9, epoch=4), 5) is E.NOT_COORDINATOR
    assert latest.take(attempt(1, epoch=5), 5) is E.NONE
    assert latest.take(attempt(2, epoch=6), 6) is E.NONE, "a later epoch of the same leadership"


def test_an_attempt_meant_for_a_later_epoch_is_refused_and_not_recorded() -> None:
    latest = LatestAttempts(5)
    assert latest.take(attempt(9, epoch=7), 6) is E.NOT_COORDINATOR
    assert latest.take(attempt(1, epoch=6), 6) is E.NONE


def test_an_attempt_without_a_number_is_accepted() -> None:
    latest = LatestAttempts(5)
    assert [latest.take(None, 5), latest.take(None, 5), latest.take(attempt(1), 5)] == [E.NONE] * 3


def test_as_many_clients_are_remembered_as_there_is_room_and_the_latest_stay() -> None:
    latest = LatestAttempts(0, max_clients=2)
    for client in ("one", "two", "one", "three"):
        assert latest.take(attempt(9, client), 5) is E.NONE
    assert len(latest) == 2
    assert latest.take(attempt(1, "one"), 5) is E.REQUEST_TIMED_OUT
    assert latest.take(attempt(1, "two"), 5) is E.NONE, "it was forgotten"


@run_by(with_groups)
async def test_commits_and_deletions_of_one_client_have_one_order(groups: CoordinatedGroups, /) -> None:
    assert await groups.commit(10, attempt=attempt(2)) == E.NONE
    assert await groups.commit(5, attempt=attempt(1)) == E.REQUEST_TIMED_OUT
    assert await groups.groups.removal.delete(GROUP, attempt(1)) is E.REQUEST_TIMED_OUT
    answers: list[g.OffsetDeleteResponse] = []
    topics = [g.OffsetDeleteTopic("orders", [0])]
    groups.groups.commits.delete(g.OffsetDeleteRequest(GROUP, topics, attempt(1)), answers.append)
    assert [answer.error_code for answer in answers] == [E.REQUEST_TIMED_OUT]
    assert await groups.committed() == 10
    assert await groups.groups.removal.delete(GROUP, attempt(3)) is E.NONE
    assert await groups.commit(5, attempt=attempt(2)) == E.REQUEST_TIMED_OUT, "the group is gone, its order is not"
