"""The replicas that are in sync, and the offset up to which the log is safe. Pure functions of the leader's picture.

The problem: the ISR lives in ZooKeeper, and while a change of it is pending, the leader does not know which one holds.
A high watermark taken over the smaller ISR could cover records that the next leader, elected from the larger, does not
have (KAFKA-8836). The choice (KIP-497): until the outcome is known, the high watermark waits for the *maximal* ISR, the
union of the committed one and the proposed; min.insync.replicas counts the committed one alone. So both err on the side
of waiting.

A follower joins once it has caught up with the high watermark *and* with the offset at which the current leader epoch
began (KAFKA-7128: the high watermark of a new leader may be far behind what its predecessor had acknowledged), fetching
under the broker epoch that the controller last announced as alive (KIP-903: a replica that was restarted empty must not
join by the fetches of its former self). And it must not lag by the rule by which it would leave: below
min.insync.replicas the high watermark waits, so that even a follower long dead has reached it.

Below min.insync.replicas the high watermark stands still (KIP-966). So a replica that leaves the ISR then still has all
that was committed, and stays eligible as leader: the last one in the ISR is not the only one that has everything.

min.insync.replicas may change at any time, brokers may have different ones (dynamic ones of their own, and files), and
all hear of changes at different times. The number by which the leader acknowledges decides. The choice: that number is
in the state znode, beside the ISR (`LeaderAndIsr.to_commit`), and the leader alone writes it. It commits nothing by a
higher number before that is on record, so each writer that shrinks the ISR, above all the controller, reads the promise
in the very state that it replaces: a write that knows less is rejected for its version. If no number is on record,
every replica that leaves stays eligible. A lower number is written as well, but nothing depends on it: if fewer
replicas are enough by now, the leader first strikes the eligible ones off, in ZooKeeper, and commits nothing until
then.

Rejected: the controller reads the settings for each decision (it cannot know the leader's file, and may be paused
between reading and writing); it always keeps a leaving replica on record (right and simpler, but after each crash every
partition would need a second write, by its leader, before it could commit again); the registration of a broker says its
setting (it is gone when the broker dies, and a change would be a second thing to keep in step).

Deleted records (KIP-107) must not come back with the next leader, so the same replicas count for the *low watermark*: a
deletion is acknowledged once the log of every electable replica begins behind it, on disk. Acknowledged records need
only their hosts' memory; but a log's start is only in the process's memory until it is in the checkpoint, so a mere
kill would undo it. (Kafka waits for every live replica and for no file. A live one outside of the ISR is not waited for
here, since it cannot be elected before it has joined, and it does not join before its log begins where the leader's
does.)
"""

from collections.abc import Iterable, Mapping

import msgspec

from minibroker.protocol.model import NO_EPOCH, LeaderAndIsr, Member, eligible_after, leader_and_isr


class Follower(msgspec.Struct):
    """The leader's picture of one follower, from its fetches in the present leader epoch. Times are monotonic, in s."""

    log_end_offset: int = -1
    """Everything below is in the follower's log; -1: it has not fetched in this epoch."""
    log_start_offset: int = -1
    """Where the follower's log begins, and would do so after a crash; -1: as above."""
    last_fetch_s: float = float("-inf")
    last_fetch_leader_end_offset: int = 0
    """The leader's log end when the follower fetched last."""
    last_caught_up_s: float = float("-inf")
    """The latest time at which the follower was known to have all that the leader had."""
    broker_epoch: int = -1


def record_fetch(
    follower: Follower,
    fetch_offset: int,
    log_start_offset: int,
    leader_end_offset: int,
    now_s: float,
    broker_epoch: int,
) -> None:
    """Record that a follower asked for `fetch_offset`, so it has everything from its `log_start_offset` to there
    (Kafka's Replica.updateFetchStateOrThrow). A late fetch of a former run of its broker is ignored: the present run
    may have lost those records.

    The follower is caught up now if it has everything, or *was* at its previous fetch if it had everything then: under
    constant load a follower is always one fetch behind, and in sync nevertheless.
    """
    if broker_epoch < follower.broker_epoch:
        return
    if fetch_offset >= leader_end_offset:
        follower.last_caught_up_s = max(follower.last_caught_up_s, now_s)
    elif fetch_offset >= follower.last_fetch_leader_end_offset:
        follower.last_caught_up_s = max(follower.last_caught_up_s, follower.last_fetch_s)
    follower.log_end_offset = fetch_offset
    follower.log_start_offset = log_start_offset
    follower.last_fetch_leader_end_offset = leader_end_offset
    follower.last_fetch_s = now_s
    follower.broker_epoch = broker_epoch


def is_caught_up(follower: Follower, leader_end_offset: int, now_s: float, lag_time_max_s: float) -> bool:
    """It has all there is, or had all there was not longer ago than the allowed lag."""
    return follower.log_end_offset >= leader_end_offset or now_s - follower.last_caught_up_s <= lag_time_max_s


def high_watermark(
    leader_end_offset: int,
    followers: Mapping[int, Follower],
    maximal_isr: Iterable[int],
    now_s: float,
    lag_time_max_s: float,
) -> int:
    """The lowest log end offset of the replicas that count: the maximal ISR, the leader among them.

    A follower that is caught up but has not joined yet counts as well: if it were not waited for, the high
    watermark would run at the leader's log end, and under load a follower, always one fetch behind, could never reach
    it. (Not where its broker is gone: see `Partition.disregard_the_gone`.) The caller never moves the high watermark
    back.
    """
    counted = set(maximal_isr)
    lowest = leader_end_offset
    for broker_id, follower in followers.items():
        if broker_id in counted or is_caught_up(follower, leader_end_offset, now_s, lag_time_max_s):
            lowest = min(lowest, max(follower.log_end_offset, 0))
    return lowest


def low_watermark(leader_start_offset: int, followers: Mapping[int, Follower], may_lead: Iterable[int]) -> int:
    """The lowest log start offset of the leader and of the followers among `may_lead`: the maximal ISR, and those who
    are eligible beside it."""
    counted = set(may_lead)
    starts = (follower.log_start_offset for broker_id, follower in followers.items() if broker_id in counted)
    return min([leader_start_offset, *starts])


def may_join(
    follower: Follower, log_start_offset: int, high_watermark: int, epoch_start_offset: int, alive_epoch: int | None
) -> bool:
    """Whether a follower outside the ISR may be proposed for it. `log_start_offset`: the leader's. `alive_epoch`: the
    broker epoch of its live run as the controller announced it, None where it is not alive."""
    return (
        alive_epoch is not None
        and follower.broker_epoch == alive_epoch
        and follower.log_start_offset >= log_start_offset
        and follower.log_end_offset >= high_watermark
        and follower.log_end_offset >= epoch_start_offset
    )


def lagging(
    leader: int,
    isr: Iterable[int],
    followers: Mapping[int, Follower],
    leader_end_offset: int,
    now_s: float,
    lag_time_max_s: float,
) -> list[int]:
    """The members of the ISR that have not been caught up for longer than `replica.lag.time.max.ms`. Never the leader,
    so the last member never leaves."""
    return [
        broker_id
        for broker_id in isr
        if broker_id != leader
        and not is_caught_up(followers.get(broker_id, Follower()), leader_end_offset, now_s, lag_time_max_s)
    ]


def proposal(
    known: LeaderAndIsr, isr: Iterable[int], followers: Mapping[int, Follower], to_commit: int
) -> LeaderAndIsr:
    """The state to be written over `known`, so that `isr` are in sync. Members keep the broker epoch that is on record
    for them; one that joins has everything in the epoch under which it fetches. `to_commit`:
    `model.min_insync_replicas`."""
    before = {member.broker_id: member for member in known.in_sync_members}
    isr = tuple(isr)
    joining = {b: Member(b, followers[b].broker_epoch if b in followers else NO_EPOCH) for b in isr if b not in before}
    return leader_and_isr(
        known.leader,
        known.leader_epoch,
        [before.get(b) or joining[b] for b in isr],
        eligible_after(known.eligible_members, before.values(), isr, to_commit),
        known.controller_epoch,
        known.partition_epoch,
        to_commit,
    )


def in_assignment_order(assignment: Iterable[int], members: Iterable[int]) -> tuple[int, ...]:
    chosen = set(members)
    return tuple(broker_id for broker_id in assignment if broker_id in chosen)
