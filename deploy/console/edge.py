"""The console's web edge: pages, event streams, static files and, if allowed, commands over HTTP.

A web page of another origin must not read the cluster through its visitor's browser. So the server binds to loopback
by default, sends no CORS header, and answers only to hosts by which it cannot be reached through DNS rebinding: IP
addresses, `localhost`, and the host that it was told to bind to. Pages load nothing from elsewhere and run no inline
script (Content-Security-Policy). Nor may it break the cluster: a command must come from a page of this console
(Origin, Sec-Fetch-Site) and carry the token of its forms.

Starlette and uvicorn were chosen over aiohttp: both are small, typed and well kept; uvicorn parses HTTP with h11, which
brokers use for their metrics already, and runs on uvloop; an ASGI application is called in tests without a socket.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import re
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar
from urllib.parse import parse_qsl

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minibroker.client.cli.timelines.failovers import failovers
from minibroker.client.cli.timelines.story import Story
from minibroker.client.cli.timelines.words import time_of_day
from minibroker.deploy.console import fault_page, pages, plots, producers, record_page
from minibroker.deploy.console.connections import BoundedProtocol
from minibroker.deploy.console.faults import Faults, MemberState, is_same_origin
from minibroker.deploy.console.markup import Markup
from minibroker.deploy.console.parts import Sections, address, age, content, frame, notice, topic_form
from minibroker.deploy.console.reading import Reader
from minibroker.deploy.console.records import AUTO, FORMATS, RecordReading, Records
from minibroker.deploy.console.sampling import Sampler
from minibroker.deploy.console.shared import Look, Pace, Reading, Readings, Shared
from minibroker.deploy.console.state import ClusterState, Groups, Timeline
from minibroker.deploy.console.views import Query, signs_of, still_true
from minibroker.deploy.named_faults import Words, WrongWords
from minibroker.deploy.observing.status import Status
from minibroker.protocol.errors import MinibrokerError
from minibroker.protocol.model import INTERNAL_TOPICS
from minibroker.protocol.words import printable

T = TypeVar("T")

EVERY_S = 0.5
GROUPS_EVERY_S = 1.0
RECORDS_EVERY_S = 1.0
SETTINGS_EVERY_S = 5.0
HEALTH_EVERY_S = 3.0
HEALTH_SHARE = 0.01
"""Of a core: a look at the cluster's health that costs more than 30 ms is followed by a longer pause."""
HEALTH_WITHIN_S = 0.5
"""A page waits so long for the first look after it has read the rest."""
HEALTH_IS_OLD_AFTER_S = 2.0
"""If something has changed since, and the look began so long before the rest was read, the page says when."""
PLAIN_PAGE_WITHIN_S = 2.5
"""A page that has no new reading by then shows the last state and says so; its event stream brings the next."""
KEEP_ALIVE_S = 10.0
"""An event stream without news sends a comment this often, and so finds out whether its viewer is there."""
MAX_STREAMS = 64
"""Event streams at a time."""
MAX_TOPICS_TOLD = 16
"""Failovers are remembered for this many topics of filters."""
MAX_RENDERED = 64
"""Pages of this many queries are kept as HTML."""
FORM_WITHIN_S = 10.0
MAX_FORM_BYTES = 4_096
MAX_FIELDS = 12
MAX_TOPIC = 249
MAX_GROUP = 1_000
MAX_NUMBER = 20
MAX_TIME = 40
TITLES = {
    "/": "Overview",
    "/failovers": "Failovers",
    "/groups": "Groups",
    plots.PATH: "Metrics",
    record_page.RECORDS: "Records",
    record_page.SETTINGS: "Settings",
    fault_page.PATH: "Faults",
}
STATIC = {"console.css": "text/css", "console.js": "text/javascript", "icon.svg": "image/svg+xml"}

HEADERS = {
    "content-security-policy": "default-src 'self'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    # With no-referrer, browsers would send no Origin with a form either.
    "referrer-policy": "same-origin",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}


class Guard:
    """Rejects requests for other hosts, and adds the headers that protect pages."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._host = host.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def protected(message: Message) -> None:
            if message["type"] == "http.response.start":
                given = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *given]
            await send(message)

        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) == 1 and self._is_ours(hosts[0]):
            await self._app(scope, receive, protected)
            return
        text = f"This console answers to IP addresses, localhost and {self._host}: use one of them in the address.\n"
        await PlainTextResponse(text, 421)(scope, receive, protected)

    def _is_ours(self, host: str) -> bool:
        name = host_name(host)
        return name in ("localhost", self._host) or _is_address(name)


def host_name(host: str) -> str:
    """Return a Host header without the port, and an IPv6 address without brackets."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0].lower() if ":" in host else host.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@dataclass(frozen=True)
class View(Generic[T]):
    """A page: what it reads, and what it shows of that."""

    readings: Readings[Query, T]
    sections: Callable[[Reading[T], Query], Sections]
    selection: Callable[[Query], Query]
    """What of the query decides what is read."""
    form: Callable[[T | None, Query], Markup] | None = None
    """What stands before the sections, if anything, and does not change while the page is shown."""
    version: Callable[[], int] = lambda: 0
    """Of what the sections show beside the reading."""


class Console:
    def __init__(
        self,
        reader: Reader,
        sampler: Sampler,
        faults: Faults | None = None,
        pace: Pace | None = None,
        health: Callable[[], Status] | None = None,
    ) -> None:
        """With `faults`, the console has a page that breaks the cluster. `health` finds what `minibroker status` shows,
        and blocks."""
        pace = pace or Pace()
        self._faults = faults
        self._reader = reader

        known: Look[Status] | None = None if health is None else Look(health, HEALTH_EVERY_S, HEALTH_SHARE)

        def of_cluster(query: Query) -> Shared[ClusterState]:
            signs: object = None

            async def read() -> ClusterState:
                nonlocal signs
                if known is None:
                    return await reader.cluster(query)
                known.begin()
                try:
                    state = await reader.cluster(query, known.value)
                except (TimeoutError, MinibrokerError):
                    await known.first(HEALTH_WITHIN_S)
                    raise
                before, signs = signs, signs_of(state)
                if before not in (None, signs):
                    known.hurry()
                await known.first(HEALTH_WITHIN_S)
                return state

            return Shared(read, EVERY_S, pace=pace, is_urgent=reader.machine_has_changed)

        def overview(reading: Reading[ClusterState], query: Query) -> Sections:
            found, error = (None, None) if known is None else (known.value, known.error)
            is_checking = known is not None and not known.is_known
            is_lost = reading.error is not None and not reader.silent
            as_of_ms = reading.read_at_ms if is_lost else None
            if found is not None and reading.value is not None and reading.error is None:
                found = still_true(found, reading.value)
            of_ms = None
            if known is not None and known.is_late and reading.read_at_ms is not None:
                is_old = reading.read_at_ms - known.began_at_ms > HEALTH_IS_OLD_AFTER_S * 1_000
                of_ms = known.began_at_ms if is_old else None
            problems = pages.problem_section(found, error, is_checking, of_ms)
            return problems | pages.overview_sections(reading.value, query, found, is_checking, as_of_ms)

        def of_timeline(_: Query) -> Shared[Timeline]:
            return Shared(reader.timeline, EVERY_S, reader.timeline_in_files, pace)

        def of_groups(query: Query) -> Shared[Groups]:
            async def read() -> Groups:
                groups = await reader.groups(query)
                sampler.lags.add(time.time(), groups.lags)
                return groups

            return Shared(read, GROUPS_EVERY_S, pace=pace)

        def of_records(query: Query) -> Shared[Records]:
            reading = RecordReading(query)
            return Shared(lambda: reader.records(reading), RECORDS_EVERY_S, pace=pace)

        def of_settings(query: Query) -> Shared[record_page.Settings]:
            return Shared(lambda: reader.settings(query), SETTINGS_EVERY_S, pace=pace)

        timelines = Readings(of_timeline)
        self._views: dict[str, View[Any]] = {
            "/": View(
                Readings(of_cluster),
                overview,
                lambda query: Query(topic=query.topic, page=query.page, internal=query.internal),
                lambda state, query: topic_form("/", query, topics_of_cluster(state)),
                lambda: 0 if known is None else known.version,
            ),
            "/failovers": View(
                timelines,
                lambda reading, query: self._failover_sections(reading.value, query),
                lambda _: Query(),
                lambda timeline, query: topic_form("/failovers", query, topics_of_timeline(timeline)),
                lambda: 0 if faults is None else faults.version,
            ),
            "/groups": View(
                Readings(of_groups),
                lambda reading, query: pages.group_sections(reading.value, query, sampler.lags.of, time.time()),
                lambda query: Query(group=query.group, page=query.page),
                version=lambda: sampler.lags.version,
            ),
        }
        self._views[plots.PATH] = View(
            timelines,
            lambda reading, _: (
                plots.metric_sections(
                    sampler.samples,
                    None if reading.value is None else self._told(reading.value, ""),
                    time.time(),
                    () if reading.value is None else reading.value.missing,
                )
                | producers.producer_sections(sampler.rates, sampler.topics)
            ),
            lambda _: Query(),
            version=lambda: sampler.version,
        )
        self._views[record_page.RECORDS] = View(
            Readings(of_records),
            lambda reading, query: record_page.record_sections(reading.value, query),
            lambda query: query._replace(form=AUTO),
            lambda records, query: record_page.record_form(() if records is None else records.topics, query),
        )
        self._views[record_page.SETTINGS] = View(
            Readings(of_settings),
            lambda reading, query: record_page.settings_sections(reading.value, query),
            lambda query: Query(topic=query.topic, broker=query.broker),
            lambda settings, query: record_page.settings_form(() if settings is None else settings.topics, query),
        )
        if faults is not None:

            def of_members(_: Query) -> Shared[tuple[MemberState, ...]]:
                return Shared(faults.members, EVERY_S)

            self._views[fault_page.PATH] = View(
                Readings(of_members),
                lambda reading, _: fault_page.fault_sections(reading.value, faults.applied, faults.token),
                lambda _: Query(),
                lambda _, __: fault_page.who_forms(faults.token),
                lambda: faults.version,
            )
        self._pages = {path: TITLES[path] for path in self._views}
        self._rendered: dict[tuple[str, Query], tuple[Reading[Any], tuple[int, tuple[int, ...]], Sections]] = {}
        self._is_ending = False
        self._streams = 0
        self._stories: dict[str, tuple[int, list[Story]]] = {}
        """For each topic, the version of the timeline and its failovers."""
        self._static = {name: (Path(__file__).parent / "static" / name).read_bytes() for name in STATIC}

    def end(self) -> None:
        """End event streams, and answer with the last state where a page waits for a new one."""
        self._is_ending = True
        for view in self._views.values():
            view.readings.end()

    def count_stream(self, change: int) -> None:
        self._streams += change

    def application(self, host: str) -> Starlette:
        return Starlette(
            routes=[
                *(Route(path, self._page) for path in self._views),
                *(Route(_events_of(path), self._events) for path in self._views),
                Route("/static/{name}", self._file),
                *([] if self._faults is None else [Route(fault_page.PATH, self._command, methods=["POST"])]),
            ],
            middleware=[Middleware(Guard, host=host)],
        )

    async def _file(self, request: Request) -> Response:
        name = request.path_params["name"]
        if name not in STATIC:
            return PlainTextResponse("There is no such file.\n", 404)
        return Response(self._static[name], media_type=STATIC[name])

    async def _page(self, request: Request) -> Response:
        return StreamingResponse(self._parts(request.url.path, query_of(request)), media_type="text/html")

    async def _parts(self, path: str, query: Query) -> AsyncIterator[str]:
        """Yield the page's frame at once, which the browser paints while the cluster is read."""
        view = self._views[path]
        before, after = frame(path, address(_events_of(path), query), self._pages)
        yield before
        reading = await view.readings.of(view.selection(query)).soon(PLAIN_PAGE_WITHIN_S)
        form = None if view.form is None else view.form(reading.value, query)
        yield content(self._sections(path, query, reading), form) + after

    async def _command(self, request: Request) -> Response:
        """Begin the command of a form, and go back to its page, which shows what it does."""
        assert self._faults is not None
        headers = request.headers
        if not is_same_origin(headers.get("host", ""), headers.get("origin"), headers.get("sec-fetch-site")):
            return PlainTextResponse("Commands are given by the buttons of this console's own pages.\n", 403)
        try:
            given = await _form_of(request)
        except _Refused as error:
            return self._refusal(request, str(error), 413)
        if not secrets.compare_digest(given.get("token", "").encode(), self._faults.token.encode()):
            return self._refusal(request, "This page is of an earlier console: reload it.", 403)
        try:
            self._faults.apply(given.get("action", "").strip(), given.get("who", "").strip(), _words_of(given))
        except MinibrokerError as error:
            return self._refusal(request, printable(str(error)), 400)
        return RedirectResponse(fault_page.PATH, 303)

    def _refusal(self, request: Request, text: str, status: int) -> Response:
        """Return the text for the page's script, or a page for a browser that has none."""
        if "text/html" not in request.headers.get("accept", ""):
            return PlainTextResponse(f"{text}\n", status)
        before, after = frame(fault_page.PATH, _events_of(fault_page.PATH), self._pages)
        return HTMLResponse(before + fault_page.refusal(text) + after, status)

    async def _events(self, request: Request) -> Response:
        if request.method == "HEAD":  # uvicorn sends no body, so that the stream would stay open in silence
            return PlainTextResponse("Event streams answer to GET only.\n", 405, {"allow": "GET"})
        path = next(path for path in self._views if _events_of(path) == request.url.path)
        if self._streams >= MAX_STREAMS:
            text = f"{MAX_STREAMS} pages are followed already: close one of them, or reload this page for news.\n"
            return PlainTextResponse(text, 503)
        return _Stream(self, self._news(path, query_of(request)))

    async def _news(self, path: str, query: Query) -> AsyncIterator[bytes]:
        """Yield all sections, then those that change. The first may be of a reading that another viewer has caused."""
        view = self._views[path]
        shared = view.readings.of(view.selection(query))
        clock = asyncio.get_running_loop().time
        sent: Sections = {}
        sent_at_s = clock()
        reading = await shared.soon(PLAIN_PAGE_WITHIN_S)
        while not self._is_ending:
            sections = self._sections(path, query, reading)
            changed = {name: text for name, text in sections.items() if sent.get(name) != text}
            if changed or clock() - sent_at_s > KEEP_ALIVE_S:
                sent, sent_at_s = sections, clock()
                yield _event(changed) if changed else b": still here\n\n"
            reading = await shared.after(reading.number)

    def _sections(self, path: str, query: Query, reading: Reading[Any]) -> Sections:
        """Render the page, unless it has been rendered from the same values."""
        silent = () if reading.error is None else self._reader.silent
        version = self._views[path].version(), silent
        last, last_version, sections = self._rendered.get((path, query), (None, (-1, ()), {}))
        read_at = None if reading.read_at_ms is None else time_of_day(reading.read_at_ms)
        if last is None or (last_version, last.error) != (version, reading.error) or last.value is not reading.value:
            sections = {"notice": notice(reading.error, reading.value is not None, silent, read_at)}
            sections |= self._views[path].sections(reading, query)
            if len(self._rendered) >= MAX_RENDERED:
                self._rendered.clear()
            self._rendered[path, query] = reading, version, sections
        return {
            "notice": sections["notice"],
            "age": age(None if reading.error is not None else read_at, reading.next_in_s),
        } | sections

    def _failover_sections(self, timeline: Timeline | None, query: Query) -> Sections:
        stories = [] if timeline is None else self._told(timeline, query.topic)
        return pages.failover_sections(timeline, stories, query, [] if self._faults is None else self._faults.applied)

    def _told(self, timeline: Timeline, topic: str) -> list[Story]:
        """Return the failovers. They are told once for each version of the timeline, not for each viewer."""
        version, stories = self._stories.get(topic, (-1, []))
        if version != timeline.version:
            stories = failovers(timeline.entries, topic or None)
            if len(self._stories) >= MAX_TOPICS_TOLD:
                self._stories.clear()
            self._stories[topic] = timeline.version, stories
        return stories


class _Stream(StreamingResponse):
    """An event stream, which counts while it is sent."""

    def __init__(self, console: Console, news: AsyncIterator[bytes]) -> None:
        super().__init__(news, media_type="text/event-stream")
        self._console = console

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._console.count_stream(1)
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._console.count_stream(-1)


class Server(uvicorn.Server):
    """Serves the console. Its warnings, one for each invalid request, are not logged."""

    def __init__(self, console: Console, host: str, ending_within_s: int) -> None:
        self._console = console
        super().__init__(
            uvicorn.Config(
                console.application(host),
                http=BoundedProtocol,
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=logging.ERROR,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                timeout_graceful_shutdown=ending_within_s,
            )
        )

    def stop(self) -> None:
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._console.end()
        # A viewer that does not read its stream is cut off after `ending_within_s`, which is no fault.
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        await super().shutdown(sockets)


def _events_of(path: str) -> str:
    return f"/events{path.rstrip('/')}"


def _event(sections: Sections) -> bytes:
    return b"event: sections\ndata: " + msgspec.json.encode(list(map(str, sections.values()))) + b"\n\n"


def topics_of_cluster(state: ClusterState | None) -> list[str]:
    return [] if state is None else list(state.topics)


def topics_of_timeline(timeline: Timeline | None) -> list[str]:
    """Return the topics that recorded changes name, except internal ones."""
    changed = {
        state["partition"].rpartition("-")[0]
        for entry in (() if timeline is None else timeline.entries)
        for state in entry.get("states", ())
    }
    return sorted(changed - INTERNAL_TOPICS)


class _Refused(Exception):
    """The form cannot be read; the message says why."""


async def _form_of(request: Request) -> dict[str, str]:
    """Return the fields of a form. Raises _Refused if it is too large, has too many fields or takes too long."""
    body = b""
    try:
        async with asyncio.timeout(FORM_WITHIN_S):
            async for part in request.stream():
                body += part
                if len(body) > MAX_FORM_BYTES:
                    raise _Refused(f"The form has more than {MAX_FORM_BYTES:,} bytes: shorten its words.")
        return dict(parse_qsl(body.decode("utf-8", "replace"), max_num_fields=MAX_FIELDS))
    except TimeoutError:
        raise _Refused(f"The form did not arrive within {FORM_WITHIN_S:g} s: send it again.") from None
    except (ClientDisconnect, ValueError):  # ValueError: more fields than a form of ours has
        raise _Refused(f"The form has more than {MAX_FIELDS} fields: use the buttons of the page.") from None


def _words_of(given: Mapping[str, str]) -> Words:
    """Raises WrongWords."""
    log_dir = given.get("log_dir", "").strip()
    if log_dir and not re.fullmatch("[1-9][0-9]{0,3}", log_dir):
        raise WrongWords(f"--log-dir is {log_dir!r}: give the number of a log directory, from 1 on, or nothing for all")
    return Words(
        given.get("time", "").strip(),
        given.get("other", "").strip(),
        int(log_dir) if log_dir else None,
        *(given.get(option) == "1" for option in ("writes", "one_way", "back")),
    )


def query_of(request: Request) -> Query:
    """Return what a stranger may have written, in bounds."""
    given = request.query_params
    page = given.get("page", "1")
    return Query(
        given.get("topic", "").strip()[:MAX_TOPIC],
        given.get("group", "")[:MAX_GROUP],
        int(page) if page.isascii() and page.isdigit() and len(page) < 8 else 1,
        given.get("internal") == "1",
        given.get("partition", "").strip()[:MAX_NUMBER],
        given.get("start", "").strip()[:MAX_TIME],
        form if (form := given.get("form", AUTO)) in FORMATS else AUTO,
        given.get("broker", "")[:MAX_NUMBER],
    )
