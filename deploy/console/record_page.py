"""The pages of records and of settings, as HTML. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from minibroker.client.administering.configs import ConfigEntry
from minibroker.client.cli.configs import SOURCES
from minibroker.client.cli.timelines.words import date_and_time
from minibroker.deploy.console.markup import Content, Markup, element, in_words
from minibroker.deploy.console.parts import Sections, address, number, section, table, topic_input
from minibroker.deploy.console.records import FORMATS, MAX_PARTITIONS, SHOWN, Records, shown
from minibroker.deploy.console.views import Query
from minibroker.protocol.model import ConfigSource
from minibroker.protocol.words import counted

RECORDS, SETTINGS = "/records", "/settings"
ALL_BROKERS = "all"
"""The owner of the defaults of all brokers, in an address."""


def record_form(topics: Iterable[str], query: Query) -> Markup:
    options = [element("option", each, value=each, selected=each == query.form) for each in FORMATS]
    return element(
        "form",
        topic_input(query.topic, topics),
        element(
            "label", "Partition ", element("input", name="partition", value=query.partition, size=5, placeholder="all")
        ),
        element(
            "label",
            "From ",
            element(
                "input", name="start", value=query.start, size=24, placeholder=f"-{SHOWN}", aria_describedby="from-help"
            ),
        ),
        element("label", "Show as ", element("select", options, name="form")),
        element("button", "Show"),
        element(
            "p",
            "From: an offset, -10 for the last 10 of each partition, beginning, or @ and a time such as "
            "@2026-11-22T10:30:00Z. Without it, the page follows the end.",
            id="from-help",
            class_="legend",
        ),
        action=RECORDS,
        role="search",
    )


def record_sections(records: Records | None, query: Query) -> Sections:
    if records is None:
        return {name: section(name) for name in ("extent", "records")}
    if not query.topic:
        links = [
            element("li", element("a", name, href=address(RECORDS, Query(topic=name))))
            for name in records.topics[:SHOWN]
        ]
        rest = len(records.topics) - len(links)
        return {
            "extent": section(
                "extent",
                element("h2", counted(len(records.topics), "topic")),
                element("ul", links) if links else element("p", "There is no topic yet."),
                element("p", f"and {rest:,} more") if rest else None,
            ),
            "records": section("records"),
        }
    problem = element("p", in_words(records.problem), class_="bad", role="alert") if records.problem else None
    total = sum(extent.end - extent.first for extent in records.extents.values())
    facts: list[Content] = []
    if records.extents:
        read = len(records.extents)
        facts = [
            counted(read, "partition")
            if read == records.partitions or query.partition
            else f"the first {MAX_PARTITIONS} of {records.partitions:,} partitions: choose one for the others",
            f", {total:,} offsets",
            "" if query.start else "; the newest records first",
        ]
        if len(records.extents) == 1:
            (extent,) = records.extents.values()
            facts.append(f", offsets {extent.first:,} to {extent.end - 1:,}" if total else "")
    has_headers = any(each.headers for each in records.records)
    rows = [
        element(
            "tr",
            element("td", each.partition),
            number(each.offset),
            element("td", date_and_time(each.timestamp_ms) if each.timestamp_ms >= 0 else "–"),
            element("td", shown(each.key, query.form), class_="data"),
            element("td", shown(each.value, query.form), class_="data"),
            element("td", [f"{name}={shown(value, query.form)} " for name, value in each.headers[:10]], class_="data")
            if has_headers
            else None,
        )
        for each in (records.records if query.start else records.records[::-1])
    ]
    header = ("Partition", "Offset", "Timestamp", "Key", "Value", *(["Headers"] if has_headers else []))
    return {
        "extent": section("extent", element("p", facts) if facts else None, problem, _record_links(records, query)),
        "records": section(
            "records",
            table("Records", header, rows) if rows else None if problem else element("p", "There is no record here."),
        ),
    }


def _record_links(records: Records, query: Query) -> Markup | None:
    """Return links to the records before and after, of one partition."""
    if len(records.extents) != 1 or not records.records:
        return None
    (extent,) = records.extents.values()
    (partition,) = records.extents
    here = query._replace(partition=str(partition.partition))
    first, last = records.records[0].offset, records.records[-1].offset  # one partition's are in this order
    links = []
    if first > extent.first:
        before = max(extent.first, first - SHOWN)
        links.append(
            element("a", "earlier records", href=address(RECORDS, here._replace(start=str(before))), rel="prev")
        )
    if last + 1 < extent.end:
        links.append(
            element("a", "later records", href=address(RECORDS, here._replace(start=str(last + 1))), rel="next")
        )
    links.append(element("a", "follow the end", href=address(RECORDS, here._replace(start=""))))
    return element("p", [[each, " "] for each in links], class_="pager")


# --- Settings --------------------------------------------------------------------------------------------------------


class Settings(NamedTuple):
    topics: tuple[str, ...]
    brokers: tuple[int, ...]
    owner: str
    """For instance "broker 1"."""
    entries: tuple[ConfigEntry, ...]
    problem: str | None


def settings_form(topics: Iterable[str], query: Query) -> Markup:
    return element("form", topic_input(query.topic, topics), element("button", "Show"), action=SETTINGS, role="search")


def settings_sections(settings: Settings | None, query: Query) -> Sections:
    if settings is None:
        return {name: section(name) for name in ("owners", "settings")}
    owners = [(f"broker {each}", Query(broker=str(each))) for each in settings.brokers]
    owners.append(("all brokers", Query(broker=ALL_BROKERS)))
    links = [
        element("a", name, href=address(SETTINGS, there), aria_current="true" if name == settings.owner else None)
        for name, there in owners
    ]
    given = [each for each in settings.entries if each.problem or each.source is not ConfigSource.DEFAULT_CONFIG]
    defaults = [each for each in settings.entries if each not in given]
    header = ("Setting", "Value", "From", "May be changed")
    none = "Nothing is set there: the brokers' own settings and the defaults apply."
    return {
        "owners": section("owners", element("p", "Settings of ", [[each, " "] for each in links], class_="pager")),
        "settings": section(
            "settings",
            element("h2", f"Settings of {settings.owner}"),
            element("p", in_words(settings.problem), class_="bad", role="alert") if settings.problem else None,
            table(f"Settings of {settings.owner}", header, [_setting(each) for each in given])
            if given
            else None
            if settings.problem
            else element("p", none),
            element(
                "details",
                element("summary", counted(len(defaults), "default")),
                table(f"Defaults of {settings.owner}", header, [_setting(each) for each in defaults]),
                id="defaults",
            )
            if defaults
            else None,
        ),
    }


def _setting(entry: ConfigEntry) -> Markup:
    value = "(secret)" if entry.is_sensitive else "–" if entry.value is None else entry.value
    overridden = [
        f"{'(secret)' if entry.is_sensitive else each.value} ({SOURCES[each.source]})" for each in entry.synonyms[1:]
    ]
    return element(
        "tr",
        element(
            "th",
            entry.name,
            element("p", in_words(entry.documentation), class_="meaning") if entry.documentation else None,
            element("p", in_words(entry.problem), class_="bad") if entry.problem else None,
            scope="row",
        ),
        element("td", value, class_="data"),
        element(
            "td",
            SOURCES[entry.source],
            element("p", f"instead of {', '.join(overridden)}", class_="meaning") if overridden else None,
        ),
        element("td", "without effect" if entry.is_without_effect else "no" if entry.is_read_only else "yes"),
    )
