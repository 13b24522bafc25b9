"""`minibroker transactions`: list, describe and abort transactions, and find hanging ones (kafka-transactions)."""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from minibroker.client.admin import Admin
from minibroker.client.administering.transactions import (
    ENDING_STATES,
    ONGOING,
    TRANSACTION_STATES,
    ProducerErrors,
    ProducerState,
    TransactionalIdErrors,
    TransactionDescription,
    TransactionListing,
)
from minibroker.client.cli.hanging import (
    GRACE_MS,
    OpenTransaction,
    hanging,
    knows,
    longest_timeout_ms,
    transactions_of,
)
from minibroker.client.cli.terminal.output import (
    DEFAULT_DATA,
    UNHEALTHY,
    BootstrapOption,
    DataOption,
    Format,
    FormatOption,
    UsageError,
    YesOption,
    bootstrap_servers,
    confirm,
    note,
    print_json,
    print_table,
    run,
    shortened,
)
from minibroker.client.cli.timelines.words import date_and_time
from minibroker.client.cli.topics import checked_topic, named_partitions, open_admin, topic_options
from minibroker.client.errors import BrokersFailed
from minibroker.protocol.acls import AclOperation
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import counted, printable

NAMED = 5
"""Open transactions that an error names."""

app = typer.Typer(help="List, describe and abort transactions, and find hanging ones.", no_args_is_help=True)

TopicOption = Annotated[str | None, typer.Option("--topic", "-t", metavar="TOPIC", help="Topic of the partition.")]


@app.command(name="list")
def list_transactions(
    state: Annotated[
        list[str] | None,
        typer.Option(
            "--state", metavar="STATE", help=f"{', '.join(TRANSACTION_STATES)}. May be repeated. Default: all."
        ),
    ] = None,
    producer_id: Annotated[
        list[int] | None,
        typer.Option("--producer-id", metavar="ID", min=0, help="Only this producer. May be repeated. Default: all."),
    ] = None,
    duration_filter: Annotated[
        int | None,
        typer.Option(
            "--duration-filter", metavar="MS", min=0, help="Only transactions that are open for more milliseconds."
        ),
    ] = None,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """List all transactional ids with their states.

    Exit code 1 if a broker does not answer; the transactional ids of the others are printed."""
    for each in state or ():
        if each not in TRANSACTION_STATES:
            raise UsageError(f"--state {each!r}: give one of {', '.join(TRANSACTION_STATES)}")
    found, failed = run(_list(bootstrap_servers(bootstrap, data), state, producer_id, duration_filter))
    if format is Format.JSON:
        print_json([each._asdict() for each in found])
    else:
        print_table(("transactional id", "producer", "state"), [(shortened(each[0]), *each[1:]) for each in found])
    if failed is not None:
        raise failed


@app.command()
def describe(
    transactional_id: Annotated[str, typer.Argument(metavar="ID", help="Transactional id.")],
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show the state, producer and coordinator of a transactional id, and the partitions of its transaction."""
    found = run(_describe(bootstrap_servers(bootstrap, data), _checked_id(transactional_id)))
    if format is Format.JSON:
        print_json(_object(found))
        return
    sys.stdout.write(f"{printable(sentence(found, time.time() * 1_000))}\n")
    if found.partitions:
        sys.stdout.write("\n")
        print_table(("topic", "partition"), found.partitions)


@app.command()
def abort(
    transactional_id: Annotated[
        str | None,
        typer.Option(
            "--transactional-id",
            metavar="ID",
            help="Abort the open transaction of this id in all of its partitions, and fence its producer.",
        ),
    ] = None,
    topic: TopicOption = None,
    partition: Annotated[
        int | None, typer.Option("--partition", "-p", min=0, help="Partition with a hanging transaction.")
    ] = None,
    start_offset: Annotated[
        int | None,
        typer.Option(
            "--start-offset", metavar="N", min=0, help="First offset of the hanging transaction in the partition."
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be aborted.")] = False,
    yes: YesOption = False,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Abort the open transaction of a transactional id, or a hanging one in a partition (see `find-hanging`).

    A running producer with this transactional id fails from then on, and has to be started anew."""
    of_partition = (topic, partition, start_offset)
    is_hanging = None not in of_partition
    if (transactional_id is None) != is_hanging or (transactional_id is not None and of_partition != (None,) * 3):
        raise UsageError(
            "choose a transaction: give either --transactional-id ID, or for a hanging one --topic TOPIC, "
            "--partition P and --start-offset N"
        )
    servers = bootstrap_servers(bootstrap, data)
    if transactional_id is not None:
        _abort_ongoing(servers, _checked_id(transactional_id), dry_run, yes, format)
    else:
        assert topic is not None
        assert partition is not None
        assert start_offset is not None
        where = TopicPartition(checked_topic(topic), partition)
        _abort_hanging(servers, where, start_offset, dry_run, yes, format)


def _abort_ongoing(servers: str, transactional_id: str, dry_run: bool, yes: bool, format: Format) -> None:
    found = run(_describe(servers, transactional_id))
    if found.state != ONGOING:
        raise MinibrokerError(not_ongoing(found))
    shown = f"the transaction of {transactional_id} ({sentence(found, time.time() * 1_000).partition(': ')[2]})"
    if not dry_run:
        sys.stdout.flush()
        confirm(f"Abort {shown}, and fence its producer?", yes)
        run(_fence(servers, transactional_id))
    if format is Format.JSON:
        print_json({"aborted": not dry_run, **_object(found)})
    else:
        sys.stdout.write(printable(f"{'would abort' if dry_run else 'aborted'} {shown}") + "\n")


def _abort_hanging(
    servers: str, partition: TopicPartition, start_offset: int, dry_run: bool, yes: bool, format: Format
) -> None:
    producer = run(_hanging_producer(servers, partition, start_offset))
    shown = (
        f"the transaction of producer {producer.producer_id}, epoch {producer.producer_epoch}, in {partition} from "
        f"offset {start_offset}"
    )
    if not dry_run:
        confirm(f"Abort {shown}?", yes)
        run(_abort(servers, partition, start_offset, producer))
    if format is Format.JSON:
        print_json({"aborted": not dry_run, **_hanging_object(OpenTransaction(partition, producer))})
    else:
        sys.stdout.write(f"{'would abort' if dry_run else 'aborted'} {shown}\n")


@app.command()
def find_hanging(
    topic: Annotated[
        list[str] | None,
        typer.Option("--topic", "-t", metavar="TOPIC", help="Only this topic. May be repeated. Default: all."),
    ] = None,
    partition: Annotated[
        list[int] | None,
        typer.Option(
            "--partition", "-p", min=0, help="Only this partition of the topic. May be repeated. Default: all."
        ),
    ] = None,
    older_than: Annotated[
        int | None,
        typer.Option(
            "--older-than",
            metavar="MS",
            min=0,
            help="Milliseconds since the last record of the transaction. Default: the brokers' "
            "transaction.max.timeout.ms, and 5 minutes more.",
        ),
    ] = None,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Find transactions that are open in a partition, and that no coordinator will end.

    Consumers with isolation level read_committed wait at their first offset. Exit code 4 if there is one, 1 if the
    leader of a partition, or a coordinator, does not answer."""
    topics = [checked_topic(name) for name in dict.fromkeys(topic or ())]
    if partition and len(topics) != 1:
        raise UsageError(f"--partition {partition[0]} needs exactly one topic: give --topic TOPIC once")
    found, failed = run(_find_hanging(bootstrap_servers(bootstrap, data), topics, partition, older_than))
    if format is Format.JSON:
        print_json([_hanging_object(each) for each in found])
    elif found:
        print_table(
            ("topic", "partition", "producer", "epoch", "start offset", "last record"),
            [
                (
                    *each.partition,
                    each.producer.producer_id,
                    each.producer.producer_epoch,
                    each.producer.current_txn_start_offset,
                    date_and_time(each.producer.last_timestamp_ms),
                )
                for each in found
            ],
        )
        (name, number), producer = found[0]
        note(
            f"to abort the first one: `minibroker transactions abort --topic {name} --partition {number} "
            f"--start-offset {producer.current_txn_start_offset}`"
        )
    elif failed is None:
        sys.stdout.write("no hanging transactions\n")
    if failed is not None:
        raise failed
    if found:
        raise typer.Exit(UNHEALTHY)


# --- Requests ----------------------------------------------------------------------------------------------------


async def _list(
    bootstrap: str, states: list[str] | None, producer_ids: list[int] | None, duration_ms: int | None
) -> tuple[list[TransactionListing], BrokersFailed | None]:
    async with open_admin(bootstrap) as admin:
        try:
            found = await admin.list_transactions(states=states, producer_ids=producer_ids, duration_ms=duration_ms)
            return found, None
        except BrokersFailed as failed:
            if not failed.results:
                raise
            each_once = {each.transactional_id: each for part in failed.results.values() for each in part}
            return sorted(each_once.values()), failed


async def _describe(bootstrap: str, transactional_id: str) -> TransactionDescription:
    async with open_admin(bootstrap, transactional_ids=[transactional_id]) as admin:
        try:
            return (await admin.describe_transactions([transactional_id]))[transactional_id]
        except TransactionalIdErrors as failed:
            raise failed.errors[transactional_id] from None


async def _fence(bootstrap: str, transactional_id: str) -> None:
    async with open_admin(bootstrap, transactional_ids=[transactional_id]) as admin:
        try:
            await admin.fence_producers([transactional_id])
        except TransactionalIdErrors as failed:
            raise failed.errors[transactional_id] from None


async def _hanging_producer(bootstrap: str, partition: TopicPartition, start_offset: int) -> ProducerState:
    """Return the producer whose transaction hangs there. Raises MinibrokerError."""
    needs = [topic_options([partition.topic], AclOperation.READ), "--operation Alter --cluster"]
    async with open_admin(bootstrap, topics=[partition.topic], needs=needs) as admin:
        producers = await _producers(admin, partition)
        for producer in producers:
            if producer.current_txn_start_offset == start_offset:
                break
        else:
            raise MinibrokerError(not_open(partition, start_offset, producers))
        found = OpenTransaction(partition, producer)
        for transaction in await transactions_of(admin, [found]):
            if knows(transaction, found):
                raise MinibrokerError(not_hanging(found, transaction))
        return producer


async def _producers(admin: Admin, partition: TopicPartition) -> tuple[ProducerState, ...]:
    try:
        return (await admin.describe_producers([partition]))[partition]
    except ProducerErrors as failed:
        raise failed.errors[partition] from None


async def _abort(bootstrap: str, partition: TopicPartition, start_offset: int, producer: ProducerState) -> None:
    needs = [topic_options([partition.topic], AclOperation.READ), "--operation Alter --cluster"]
    async with open_admin(bootstrap, topics=[partition.topic], needs=needs) as admin:
        await admin.abort_transaction(
            partition,
            producer_id=producer.producer_id,
            producer_epoch=producer.producer_epoch,
            coordinator_epoch=producer.coordinator_epoch or 0,
            start_offset=start_offset,
        )


async def _find_hanging(
    bootstrap: str, topics: list[str], numbers: list[int] | None, older_than_ms: int | None
) -> tuple[list[OpenTransaction], ProducerErrors | None]:
    """Return the hanging transactions, and the errors of partitions whose leader does not answer."""
    needs = [topic_options(topics, AclOperation.READ)] if topics else []
    if older_than_ms is None:
        needs.append("--operation DescribeConfigs --cluster")
    async with open_admin(bootstrap, topics=topics, needs=needs) as admin:
        partitions = await named_partitions(admin, topics or None, numbers)
        if older_than_ms is None:
            older_than_ms = await longest_timeout_ms(admin) + GRACE_MS
        before_ms = time.time() * 1_000 - older_than_ms
        try:
            producers, failed = await admin.describe_producers(partitions), None
        except ProducerErrors as error:
            producers, failed = error.results, error
        return await hanging(admin, producers, before_ms), failed


# --- Output ------------------------------------------------------------------------------------------------------


def sentence(found: TransactionDescription, now_ms: float) -> str:
    """Return one line about a transactional id."""
    since = "" if found.started_ms is None else f" for {max(0.0, now_ms - found.started_ms) / 1_000:,.1f} s"
    parts = [
        f"{found.transactional_id}: {found.state}{since}",
        f"time-out {found.timeout_ms / 1_000:,g} s",
        f"producer {found.producer_id} in epoch {found.producer_epoch}",
        f"coordinator broker {found.coordinator.node_id} ({found.coordinator.address})",
        *([counted(len(found.partitions), "partition")] if found.partitions else []),
    ]
    return ", ".join(parts)


def not_ongoing(found: TransactionDescription) -> str:
    """Return why there is nothing to abort."""
    if found.state in ENDING_STATES:
        return (
            f"the transaction of {found.transactional_id} cannot be aborted: its outcome is decided ({found.state}), "
            f"and its coordinator, broker {found.coordinator.node_id}, is writing it to "
            f"{counted(len(found.partitions), 'partition')}. If that does not end, see `minibroker status`"
        )
    return f"{found.transactional_id} has no open transaction: it is {found.state}, so there is nothing to abort"


def not_open(partition: TopicPartition, start_offset: int, producers: Sequence[ProducerState]) -> str:
    """Return why no transaction that begins there can be aborted."""
    offsets = sorted(each.current_txn_start_offset for each in producers if each.current_txn_start_offset is not None)
    shown = ", ".join(map(str, offsets[:NAMED])) + (f" and {len(offsets) - NAMED} more" if len(offsets) > NAMED else "")
    others = f"the open ones begin at {shown}" if offsets else "none is open there"
    return (
        f"no open transaction of {partition} begins at offset {start_offset}: {others}. "
        "See `minibroker transactions find-hanging`"
    )


def not_hanging(found: OpenTransaction, transaction: TransactionDescription) -> str:
    """Return why a transaction must not be aborted in one of its partitions."""
    transactional_id = transaction.transactional_id
    return (
        f"the transaction of producer {found.producer.producer_id} in {found.partition} does not hang: its coordinator "
        f"knows it as {transactional_id} ({transaction.state}). To abort it in all of its partitions, use "
        f"`minibroker transactions abort --transactional-id {shlex.quote(transactional_id)}`"
    )


def _object(found: TransactionDescription) -> dict[str, object]:
    return {
        **found._asdict(),
        "partitions": [each._asdict() for each in found.partitions],
        "coordinator": found.coordinator.node_id,
    }


def _hanging_object(found: OpenTransaction) -> dict[str, object]:
    return found.partition._asdict() | found.producer._asdict()


def _checked_id(transactional_id: str) -> str:
    if not transactional_id:
        raise UsageError("'': a transactional id is not empty; `minibroker transactions list` shows them")
    return transactional_id
