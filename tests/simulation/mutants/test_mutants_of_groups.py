"""Each planted bug of groups makes a test fail by name, since storms meet some of them seldom."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from minibroker.protocol.errors import ErrorCode
from tests.simulation.mutants import planted
from tests.simulation.scenarios.groups import test_consumer_groups as consumers
from tests.simulation.scenarios.groups import test_groups as groups
from tests.unit.broker.groups import test_groups_commits as commits
from tests.unit.broker.groups import test_groups_coordinator as coordinator
from tests.unit.client.consuming import test_assignors as assignors
from tests.unit.client.consuming import test_group_member as member

pytestmark = pytest.mark.slow

Test = Callable[[Path], None]


def _deposed(_: Path) -> None:
    groups.test_a_coordinator_that_was_paused_tells_no_offset_of_old_when_it_goes_on()


def _stranger(path: Path) -> None:
    coordinator.test_a_heartbeat_that_is_nobodys_is_told_why(path, {"generation_id": 7}, ErrorCode.ILLEGAL_GENERATION)


def _ahead(_: Path) -> None:
    member.test_auto_commit_counts_what_is_in_hand_only_if_the_consumer_is_left_without_an_exception("records", "break")


def _lost(_: Path) -> None:
    consumers.test_a_member_that_was_stopped_for_longer_than_its_session_commits_nothing_when_it_is_back(1)


def _waits(_: Path) -> None:
    consumers.test_a_commit_in_the_middle_of_a_rebalance_is_over_with_it_although_nothing_changed_hands(0)


def _earlier(_: Path) -> None:
    member.test_offsets_that_were_committed_in_an_earlier_topic_of_that_name_do_not_count()


def _stale(_: Path) -> None:
    assignors.test_of_two_that_claim_a_partition_the_later_generation_is_right()


def _one_generation(_: Path) -> None:
    assignors.test_what_two_claim_in_one_generation_goes_to_nobody_until_both_gave_it_back()


FAILS: dict[str, Test] = {
    "commit-waits-for-another-rebalance": _waits,
    "committed-ahead": _ahead,
    "committed-for-an-earlier-topic": _earlier,
    "deposed-coordinator-is-believed": _deposed,
    "generation-not-checked": commits.test_members_commit_while_the_group_gathers_and_not_while_it_is_shared_out,
    "heartbeat-of-a-stranger-is-taken": _stranger,
    "load-outlives-its-term": coordinator.test_a_load_that_ends_after_the_leadership_changes_nothing,
    "loaded-before-it-is-replicated": (
        coordinator.test_while_the_groups_are_loaded_requests_wait_for_it_and_heartbeats_are_well
    ),
    "lost-partitions-are-kept": _lost,
    "moved-at-once": _one_generation,
    "sessions-end-with-the-coordinator": coordinator.test_a_member_that_is_silent_after_its_group_was_loaded_is_put_out,
    "stale-claims-are-believed": _stale,
}


@pytest.mark.parametrize("mutant", FAILS)
def test_the_mutant_makes_a_test_fail(mutant: str, tmp_path: Path) -> None:
    with planted(mutant), pytest.raises((AssertionError, TimeoutError)):
        FAILS[mutant](tmp_path)
