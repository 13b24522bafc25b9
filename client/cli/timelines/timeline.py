"""`minibroker timeline`: what the controllers did, and the stories of failovers."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from minibroker.client.administering.timeline import Entry, TimelineRead, decode_entry, merged
from minibroker.client.cli.terminal.hints import pastable
from minibroker.client.cli.terminal.output import (
    DEFAULT_DATA,
    UNHEALTHY,
    BootstrapOption,
    DataOption,
    Format,
    FormatOption,
    UsageError,
    bootstrap_servers,
    inform,
    note,
    print_json,
    print_table,
    run,
)
from minibroker.client.cli.terminal.times import hint, parse_time_ms
from minibroker.client.cli.timelines.failovers import failovers, of_topic
from minibroker.client.cli.timelines.story import Story
from minibroker.client.cli.timelines.unfinished import stalls, unfinished
from minibroker.client.cli.timelines.words import date_and_time, entry_lines, milliseconds
from minibroker.client.cli.topics import open_admin
from minibroker.protocol.errors import BrokerError, ErrorCode, InvalidMessage, MinibrokerError, NetworkError
from minibroker.protocol.words import counted, listed, plural

FILE = "controller-timeline.jsonl"
"""The file of each broker, in its first log directory."""
_FOLLOW_INTERVAL_S = 0.5
_BEGINNING = 0


class Known(NamedTuple):
    entries: Sequence[Entry]
    is_refused: bool
    """Whether entries are missing because access control refused them."""
    unfinished: Sequence[str] = ()
    """Sentences about brokers that are lost or have no ZooKeeper, though no failover is recorded yet."""


def timeline(
    last: Annotated[
        bool,
        typer.Option("--last-failover", help="Explain the last failover."),
    ] = False,
    every: Annotated[
        bool, typer.Option("--failovers", help="List the failovers, the last one at the end, which has number 1.")
    ] = False,
    number: Annotated[
        int | None, typer.Option("--failover", metavar="N", min=1, help="Explain number N of --failovers.")
    ] = None,
    topic: Annotated[
        str | None, typer.Option(metavar="NAME", help="Omit other topics, and events that changed none of this topic.")
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Print new events until Ctrl-C.")] = False,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Omit older events: ISO 8601, or milliseconds since 1970."),
    ] = None,
    bootstrap: BootstrapOption = None,
    data: DataOption = DEFAULT_DATA,
    format: FormatOption = Format.TABLE,
) -> None:
    """Show what the controllers did: each event with its cause, changes, writes to ZooKeeper and orders to brokers.

    All brokers are asked, because each one records what its own controller did. For a dead broker, the files in --data
    are read if they exist; otherwise its entries are missing until it is back, which is reported on stderr. If access
    control hides the entries of a broker, the code is 4. --format json prints one object per line."""
    asked = [*["--last-failover"] * last, *["--failovers"] * every, *["--failover"] * (number is not None)]
    if len(asked) > 1:
        raise UsageError(f"{' and '.join(asked)}: give one of them")
    if asked and follow:
        raise UsageError(f"{asked[0]} is about past events and --follow prints new ones: give one of them")
    if topic is not None and follow:
        raise UsageError("--follow prints the events of all topics: leave out --topic")
    since_ms = _since_ms(since)
    files = data if bootstrap is None else None
    try:
        servers = bootstrap_servers(bootstrap, data)
    except MinibrokerError:  # the cluster was stopped; its files may still be there
        if follow or files is None or not any(entries_of_all(files, _BEGINNING).values()):
            raise
        servers = None
    if follow and servers is not None:
        run(_follow(servers, since_ms, files, format))
        return
    found = run(_read(servers, since_ms, files))
    _show(found, asked, number, topic, since, format)
    if found.is_refused:
        raise typer.Exit(UNHEALTHY)


def _show(
    found: Known,
    asked: Sequence[str],
    number: int | None,
    topic: str | None,
    since: str | None,
    format: Format,
) -> None:
    """Print the entries, or what is asked of the failovers. Raises MinibrokerError if there is none, UsageError."""
    entries, is_refused, lost = found
    of_its_topic = entries if topic is None else of_topic(entries, topic)
    if topic is not None:
        if any("states_omitted" in entry for entry in entries):
            note("some changes name only their first partitions, so partitions of the topic may be missing")
        if not any(map(_names_partitions, of_its_topic)):
            raise MinibrokerError(
                f"no recorded change names a partition of topic {topic!r}: see `minibroker topics list`, and the whole "
                "`minibroker timeline`"
            )
    if not asked:
        _print(entries if topic is None else list(filter(_names_partitions, of_its_topic)), format)
        return
    stories = failovers(entries, topic)
    if not stories:
        then = "" if since is None else f" since {since}"
        why = "some entries are missing" if is_refused else "no broker was lost while others ran"
        coming = "".join(f"; {sentence}" for sentence in [*lost, *stalls(entries, _BEGINNING)])
        raise MinibrokerError(f"no failover is {'known' if is_refused else 'recorded'}{then}: {why}{coming}")
    if "--failovers" in asked:
        _print_stories(stories, format)
    elif number is None or number == 1:
        _print_story(stories[-1], "The last failover", format)
    elif number <= len(stories):
        _print_story(stories[-number], f"Failover {number}", format)
    else:
        raise UsageError(f"--failover {number}: {counted(len(stories), 'failover')} recorded: see --failovers")
    if number is None or number == 1:
        ended_ms = stories[-1].began_ms + max(step.at_ms for step in stories[-1].steps)
        for sentence in [*lost, *stalls(entries, ended_ms)]:
            inform(f"no later failover is recorded, but {sentence}")


def _names_partitions(entry: Entry) -> bool:
    return bool(entry.get("states") or entry.get("adopted"))


def _since_ms(since: str | None) -> int:
    if since is None:
        return _BEGINNING
    time_ms = parse_time_ms(since)
    if time_ms is None:
        raise UsageError(
            f"--since {since!r}: give a time, for instance 2026-11-22T10:30 (UTC) or 1795343400000{hint(since)}"
        )
    return time_ms


async def _read(bootstrap: str | None, since_ms: int, files: Path | None) -> Known:
    """`bootstrap`: None if only the files are left."""
    if bootstrap is None:
        assert files is not None
        return Known(merged(entries_of_all(files, since_ms)), False)
    try:
        async with open_admin(bootstrap) as admin:
            found = await admin.timeline(since_ms)
            brokers = (await admin.describe_cluster()).brokers
            away_s = await admin.zookeeper_away_s(broker for broker in brokers if broker.id not in found.errors)
    except NetworkError as error:
        by_broker = {} if files is None else entries_of_all(files, since_ms)
        if not by_broker:
            raise
        sys.stderr.write(pastable(f"the entries are read from the brokers' files: {error}") + "\n")
        return Known(merged(by_broker), False)
    entries, is_refused = with_files(found, files, since_ms)
    return Known(entries, is_refused, [*unfinished(entries, found.errors, [broker.id for broker in brokers], away_s)])


async def _follow(bootstrap: str, since_ms: int, files: Path | None, format: Format) -> None:
    """Print the recorded entries, then new ones, forever. If a broker dies, the others are asked."""
    async with open_admin(bootstrap) as admin:
        reader = admin.timeline_reader(since_ms)
        found = await reader.read()
        missing = set(found.errors)
        entries, _ = with_files(found, files, since_ms)
        # Entries that were read from files are sent again by their broker once it is back.
        from_files = {(e["controller"], e["number"], e["time_ms"]) for e in entries if e["controller"] in missing}
        _print(entries, format)
        while True:
            await asyncio.sleep(_FOLLOW_INTERVAL_S)
            try:
                found = await reader.read()
            except (NetworkError, BrokerError) as error:
                note(f"no broker answers; retrying: {error}")
                continue
            missing &= set(found.errors)
            _tell_missing({broker: text for broker, text in found.errors.items() if broker not in missing})
            missing |= set(found.errors)
            _print([e for e in found.entries if (e["controller"], e["number"], e["time_ms"]) not in from_files], format)


def with_files(found: TimelineRead, files: Path | None, since_ms: int) -> tuple[Sequence[Entry], bool]:
    """Return the brokers' entries, and those in the files of brokers that did not answer; and whether entries are
    missing because access control refused them. Raises BrokerError if there is nothing but refusals."""
    by_broker: dict[int, list[Entry]] = {}
    for entry in found.entries:
        by_broker.setdefault(entry["controller"], []).append(entry)
    untold = dict(found.errors)
    for broker_id in found.errors:
        entries = None if files is None else entries_in_files(files, broker_id, since_ms)
        if entries is not None:
            by_broker[broker_id] = entries
            del untold[broker_id]
    refused = [error for error in untold.values() if _is_refusal(error)]
    if refused and not by_broker:
        raise refused[0]
    _tell_missing(untold)
    return merged(by_broker), bool(refused)


def _is_refusal(error: MinibrokerError) -> bool:
    return isinstance(error, BrokerError) and error.code is ErrorCode.CLUSTER_AUTHORIZATION_FAILED


def entries_of_all(data: Path, since_ms: int) -> dict[int, list[Entry]]:
    """Return the entries in the files of a local cluster, by broker, dead or alive. Brokers without a file are left
    out."""
    ids = sorted(int(path.name.removeprefix("broker-")) for path in data.glob("broker-*") if path.name[7:].isdecimal())
    found = {broker_id: entries_in_files(data, broker_id, since_ms) for broker_id in ids}
    return {broker_id: entries for broker_id, entries in found.items() if entries is not None}


def entries_in_files(data: Path, broker_id: int, since_ms: int) -> list[Entry] | None:
    """Return the entries in the files of a broker of the local cluster; empty if it was never controller. None: the
    file cannot be read."""
    entries: list[Entry] = []
    current = data / f"broker-{broker_id}" / FILE
    if not os.access(current, os.R_OK):
        return None
    for path in (current.with_name(FILE + ".1"), current):
        try:
            lines = path.read_bytes().splitlines()
        except OSError:
            continue
        for line in lines:
            try:
                entry = decode_entry(line)
            except InvalidMessage:
                continue  # torn when the broker was killed
            if entry["time_ms"] >= since_ms:
                entries.append(entry)
    return entries


def _tell_missing(errors: dict[int, MinibrokerError]) -> None:
    alike: dict[str, list[int]] = {}
    for broker_id, error in errors.items():
        alike.setdefault(str(error), []).append(broker_id)
    for text, broker_ids in alike.items():
        whose = f"{plural(len(broker_ids), 'broker')} {listed(broker_ids)}"
        sys.stderr.write(pastable(f"the entries of {whose} are missing: {text}") + "\n")
    sys.stderr.flush()


def _print(entries: Sequence[Entry], format: Format) -> None:
    bold = format is Format.TABLE and sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    for entry in entries:
        if format is Format.JSON:
            print_json(entry)
            continue
        first, *details = entry_lines(entry)
        sys.stdout.write(f"\x1b[1m{first}\x1b[0m\n" if bold else f"{first}\n")
        sys.stdout.writelines(f"{line}\n" for line in details)
    sys.stdout.flush()


def _print_story(story: Story, name: str, format: Format) -> None:
    if format is Format.JSON:
        for step in story.objects():
            print_json(step)
    else:
        sys.stdout.writelines(f"{line}\n" for line in story.lines(name=name))


def _print_stories(stories: Sequence[Story], format: Format) -> None:
    """Print a row for each: when it began, what happened, and how long it took until all was led again."""
    if format is Format.JSON:
        for story in stories:
            print_json(story.objects()[-1])
        return
    rows = [
        (
            len(stories) - index,
            date_and_time(story.began_ms),
            _led_again(story),
            story.elected,
            len(story.leaderless),
            story.title,
        )
        for index, story in enumerate(stories)
    ]
    print_table(("NUMBER", "BEGAN", "LED AGAIN AFTER", "NEW LEADERS", "LEADERLESS", "WHAT HAPPENED"), rows)


def _led_again(story: Story) -> str | None:
    """Return the longest time of a partition from the loss of its leader until it was led again, or until no write
    waited for lost replicas any more."""
    if story.led_ms is None and story.late_ms is None:
        if story.elected or story.leaderless or story.left_ms is None:
            return None
        return f"{milliseconds(story.left_ms)}, acks=all only"
    text = milliseconds(max(story.outage_ms or 0.0, story.late_ms or 0.0))
    return f"{text} from notice" if story.noticed_late else text
