"""The parts of which pages are made: the frame, sections, tables, forms. Pure.

A page is a frame and sections. The plain page has all sections; the event stream sends those that have changed, by
their ids.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import ceil
from urllib.parse import urlencode

from minibroker.deploy.console.markup import Content, Markup, element, in_words, markup
from minibroker.deploy.console.views import Query
from minibroker.protocol.words import all_of

_LATE_S = 1.5
"""A page that is older says so. The pages of small clusters are read twice a second."""
NUMBERS = {
    "Leads",
    "Partitions",
    "In sync",
    "Out of sync",
    "High watermark",
    "Leader epoch",
    "Step",
    "Time",
    "Committed",
    "Lag",
    "Generation",
    "Took",
    "Moved",
    "Left",
    "Done",
    "Records/s",
    "Bytes/s",
    "Requests/s",
    "Refused/s",
    "Mean time",
    "For followers",
    "Waiting",
    "Timed out",
    "Offset",
}
"""Columns with numbers."""

Sections = dict[str, Markup]


def content(sections: Sections, form: Markup | None = None) -> str:
    return markup(form, *sections.values())


def frame(path: str, events: str, pages: Mapping[str, str]) -> tuple[str, str]:
    """Return what stands before the content of a page, and after it. `events` is the address of its event stream,
    `pages` has the titles of all pages."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{pages[path]} · minibroker"),
        element("link", rel="icon", href="/static/icon.svg", type="image/svg+xml"),
        element("link", rel="stylesheet", href="/static/console.css"),
        element("script", src="/static/console.js", defer=True),
    )
    links = (
        element("a", title, href=there, aria_current="page" if there == path else None)
        for there, title in pages.items()
    )
    here = Markup("\0")
    body = element(
        "body",
        element("a", "Skip to the content", class_="skip", href="#content"),
        element(
            "header",
            element("strong", "minibroker"),
            element("nav", links, aria_label="Pages"),
            element("span", "not live: reload for news", id="connection", role="status"),
        ),
        element("main", element("h1", pages[path]), here, id="content"),
        data_events=events,
    )
    before, _, after = ("<!doctype html>\n" + element("html", head, body, lang="en")).partition(here)
    return before, after


def notice(error: str | None, has_state: bool, silent: Sequence[int] = (), read_at: str | None = None) -> Markup:
    """Return the section that says that the cluster cannot be read. `silent` are the brokers that do not answer, while
    others do. `read_at` is the time of the state in words, if it was read from the brokers."""
    of = "" if read_at is None else f", of {read_at}"
    if error is None:
        return section("notice")
    if silent:
        do = "does" if len(silent) == 1 else "do"
        then = f"The page shows the last known state{of}, until" if has_state else "There is nothing to show until"
        return section(
            "notice",
            element(
                "p",
                element("strong", f"{capitalized(all_of('broker', silent))} {do} not answer. "),
                f"{then} all others have answered.",
            ),
            element("p", in_words(error)),
            role="alert",
        )
    then = f"The page shows the last known state{of}." if has_state else "There is nothing to show yet."
    return section(
        "notice",
        element("p", element("strong", "No broker answers. "), then),
        element("p", in_words(error)),
        role="alert",
    )


def age(read_at: str | None, next_in_s: float) -> Markup:
    """Return the section that says how old a page of a large cluster is, which would look live; empty for others."""
    if read_at is None or next_in_s < _LATE_S:
        return section("age")
    then = f"the next one follows within {ceil(next_in_s)} s"
    text = f"As of {read_at}. A reading of this cluster takes much processor time, so {then}."
    return section("age", element("p", text, class_="legend"))


def section(name: str, *contents: Content, **attributes: str) -> Markup:
    return element("section", *contents, id=f"section-{name}", **attributes)


def table(label: str, header: Sequence[str], rows: Sequence[Markup]) -> Markup:
    """Return a table that scrolls by itself, also by keyboard, if the window is narrow."""
    rows_and_header = element(
        "table",
        element(
            "thead",
            element(
                "tr",
                [element("th", name, scope="col", class_="number" if name in NUMBERS else None) for name in header],
            ),
        ),
        element("tbody", rows),
    )
    return element("div", rows_and_header, class_="scroll", tabindex=0, role="region", aria_label=label)


def number(value: int | None) -> Markup:
    return element("td", "–" if value is None else f"{value:,}", class_="number")


def topic_form(path: str, query: Query, topics: Iterable[str]) -> Markup:
    """Return the filter, which stands outside the sections, so that news do not disturb typing."""
    return element(
        "form",
        topic_input(query.topic, topics),
        element("button", "Show"),
        element("a", "all topics", href=path) if query.topic else None,
        action=path,
        role="search",
    )


def topic_input(topic: str, topics: Iterable[str]) -> Content:
    return [
        element("label", "Topic ", element("input", name="topic", value=topic, list="topics", autocomplete="off")),
        element("datalist", [element("option", value=name) for name in topics], id="topics"),
    ]


def pager(path: str, query: Query, at: int, pages: int, count: str) -> Markup:
    if pages == 1:
        return element("p", count)
    links: list[Content] = [f"{count}, page {at} of {pages}"]
    if at > 1:
        links.append(element("a", "previous page", href=address(path, query._replace(page=at - 1)), rel="prev"))
    if at < pages:
        links.append(element("a", "next page", href=address(path, query._replace(page=at + 1)), rel="next"))
    return element("p", [markup(link, " ") for link in links], class_="pager")


def address(path: str, query: Query) -> str:
    """Return the address of a page with this query."""
    none = Query()
    chosen = {name: value for name, value in query._asdict().items() if value != getattr(none, name)}
    text = urlencode({name: int(value) if isinstance(value, bool) else value for name, value in chosen.items()})
    return f"{path}?{text}" if text else path


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
