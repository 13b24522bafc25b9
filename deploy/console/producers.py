"""What brokers see of producers: counters of their metrics, rates between two looks at them, and their HTML. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from minibroker.client.cli.timelines.words import milliseconds
from minibroker.deploy.console.markup import Content, Markup, element
from minibroker.deploy.console.parts import Sections, section, table
from minibroker.protocol.model import TopicPartition
from minibroker.protocol.words import in_bytes

TOPICS_SHOWN = 10

_TIMES = 'kafka_network_requestmetrics_{}{{request="Produce"}}'
_TRAFFIC = "kafka_server_brokertopicmetrics_{}_total{{"
_WAITING = 'kafka_server_delayedoperationpurgatory_numdelayedoperations{delayedoperation="Produce"}'
_EXPIRED = "kafka_server_delayedproducemetrics_expires_total"
_ERRORS = re.compile(r"\nkafka_network_requestmetrics_errors_total\{([^}]*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')


class Counters(NamedTuple):
    """Of one broker, since it started, except `waiting`."""

    requests: float
    """Produce requests answered."""
    total_ms: float
    remote_ms: float
    """Of these, waiting for followers."""
    records: float
    bytes: float
    waiting: float
    """Produce requests that wait for followers now."""
    expired: float
    """Produce requests whose time was up."""
    refused: Mapping[str, float] = MappingProxyType({})
    """Batches answered with an error, by its name."""


class Seen(NamedTuple):
    """The last look at a broker, by a monotonic clock."""

    at_s: float
    counters: Counters
    answering_at_s: float
    """The last look at which requests had been answered since the one before, or none waited."""


class Rates(NamedTuple):
    """Of the producers of one broker, between two looks."""

    broker: int
    records_per_s: float
    bytes_per_s: float
    requests_per_s: float
    mean_ms: float | None
    """None: no request was answered."""
    mean_remote_ms: float | None
    waiting: int
    expired: int
    """Since the broker started."""
    stalled_s: float
    """Requests have waited and none has been answered for at least so long. 0: they are answered."""
    refused_per_s: Mapping[str, float] = MappingProxyType({})
    """Batches answered with an error, by its name; the most frequent first."""


def counters_of(metrics: str) -> Counters | None:
    """Return the counters of a broker's metrics; None while it starts."""
    metrics = "\n" + metrics
    times = [_value(metrics, _TIMES.format(name)) for name in ("totaltimems_count", "totaltimems_sum")]
    if times[0] is None or times[1] is None:
        return None
    return Counters(
        times[0],
        times[1],
        _value(metrics, _TIMES.format("remotetimems_sum")) or 0.0,
        _sum(metrics, _TRAFFIC.format("messagesin")),
        _sum(metrics, _TRAFFIC.format("bytesin")),
        _value(metrics, _WAITING) or 0.0,
        _value(metrics, _EXPIRED) or 0.0,
        {
            error["error"]: float(value)
            for text, value in _ERRORS.findall(metrics)
            if (error := dict(_LABEL.findall(text))).get("request") == "Produce" and "error" in error
        },
    )


def _value(metrics: str, name: str) -> float | None:
    _, there, rest = metrics.partition(f"\n{name} ")
    return float(rest.partition("\n")[0]) if there else None


def _sum(metrics: str, prefix: str) -> float:
    """Return the sum of a family, whose lines follow each other."""
    total = 0.0
    at = metrics.find("\n" + prefix) + 1
    while at and metrics.startswith(prefix, at):
        end = metrics.find("\n", at)
        line = metrics[at:] if end < 0 else metrics[at:end]
        total += float(line.rpartition(" ")[2])
        at = end + 1
    return total


def look(before: Mapping[int, Seen], found: Mapping[int, Counters], at_s: float) -> tuple[dict[int, Seen], list[Rates]]:
    """Return what has been seen now, and the rates of the brokers that were seen before. A broker that has started
    anew counts from zero."""
    seen, rates = {}, []
    for broker, counters in sorted(found.items()):
        earlier = before.get(broker)
        if earlier is None or earlier.counters.requests > counters.requests:
            seen[broker] = Seen(at_s, counters, at_s)
            continue
        grown = [now - then for now, then in zip(counters[:-1], earlier.counters[:-1], strict=True)]
        requests, total_ms, remote_ms, records, size, _, _ = grown
        seconds = max(at_s - earlier.at_s, 0.001)
        answering_at_s = earlier.answering_at_s if counters.waiting and not requests else at_s
        seen[broker] = Seen(at_s, counters, answering_at_s)
        rates.append(
            Rates(
                broker,
                records / seconds,
                size / seconds,
                requests / seconds,
                total_ms / requests if requests else None,
                remote_ms / requests if requests else None,
                int(counters.waiting),
                int(counters.expired),
                at_s - answering_at_s,
                _grown(earlier.counters.refused, counters.refused, seconds),
            )
        )
    return seen, rates


def _grown(before: Mapping[str, float], now: Mapping[str, float], seconds: float) -> dict[str, float]:
    grown = {error: (count - before.get(error, 0.0)) / seconds for error, count in now.items()}
    return {error: rate for error, rate in sorted(grown.items(), key=lambda one: -one[1]) if rate > 0}


def refused_per_s(rates: Sequence[Rates]) -> float | None:
    """Return the refused batches per second of all brokers; None if no broker's rates are known."""
    return sum(sum(each.refused_per_s.values()) for each in rates) if rates else None


def mean_ms(rates: list[Rates]) -> float | None:
    """Return the mean time of the requests of all brokers; None if there were none."""
    requests = sum(each.requests_per_s for each in rates)
    return sum(each.requests_per_s * each.mean_ms for each in rates if each.mean_ms) / requests if requests else None


def topic_rates(
    before: Mapping[TopicPartition, int], now: Mapping[TopicPartition, int], seconds: float
) -> dict[str, float]:
    """Return the records per second of each topic, from the ends of its partitions that both looks have seen. A log
    whose end went back counts as none."""
    grown: Counter[str] = Counter()
    for partition, end in now.items():
        if partition in before:
            grown[partition.topic] += max(0, end - before[partition])
    return {topic: count / max(seconds, 0.001) for topic, count in grown.items()}


_COLUMNS = (
    "Broker",
    "Records/s",
    "Bytes/s",
    "Requests/s",
    "Refused/s",
    "Mean time",
    "For followers",
    "Waiting",
    "Timed out",
    "State",
)


def producer_sections(rates: Sequence[Rates], topics: Mapping[str, float]) -> Sections:
    """`topics` has the records per second of each topic."""
    contents: list[Content] = [element("h2", "Producers, as the brokers see them")]
    if rates:
        contents.append(table("Producers by broker", _COLUMNS, [_row(each) for each in rates]))
        text = (
            "Since the sample before. Refused: batches answered with an error, one for each partition of a request. "
            "Mean time: of a Produce request, refused or not; for followers: the part of it that it waited for them. "
            "Waiting: requests that wait for followers now. Timed out: since the broker started. A broker is stalled "
            "if requests wait and none has been answered since the sample before."
        )
    else:
        text = (
            "Times and waiting requests come from the metrics ports of the brokers, and appear with the second sample "
            "of a cluster of this machine (--data)."
        )
    contents.append(element("p", text, class_="legend"))
    busiest = sorted(topics.items(), key=lambda one: (-one[1], one[0]))
    if busiest:
        rows = [
            element("tr", element("th", topic, scope="row"), _cell(f"{rate:,.1f}"))
            for topic, rate in busiest[:TOPICS_SHOWN]
        ]
        contents.append(table("Producers by topic", ("Topic", "Records/s"), rows))
        rest = len(busiest) - len(rows)
        contents.append(element("p", f"and {rest:,} more topics with fewer records") if rest else None)
    return {"producers": section("producers", *contents)}


def _row(rates: Rates) -> Markup:
    if rates.stalled_s:
        state = element("td", f"✗ stalled for {rates.stalled_s:.0f} s", class_="dead")
    elif rates.refused_per_s:
        errors = ", ".join(f"{error} {rate:,.1f}/s" for error, rate in rates.refused_per_s.items())
        state = element("td", f"✗ refuses: {errors}", class_="reason dead")
    else:
        state = element("td", "✓ answers" if rates.requests_per_s else "no request")
    return element(
        "tr",
        element("th", rates.broker, scope="row"),
        _cell(f"{rates.records_per_s:,.1f}"),
        _cell(f"{in_bytes(round(rates.bytes_per_s))}"),
        _cell(f"{rates.requests_per_s:,.1f}"),
        _cell(f"{sum(rates.refused_per_s.values()):,.1f}"),
        _cell("–" if rates.mean_ms is None else milliseconds(rates.mean_ms)),
        _cell("–" if rates.mean_remote_ms is None else milliseconds(rates.mean_remote_ms)),
        _cell(f"{rates.waiting:,}"),
        _cell(f"{rates.expired:,}"),
        state,
        class_="bad" if rates.stalled_s or rates.refused_per_s else None,
    )


def _cell(text: str) -> Markup:
    return element("td", text, class_="number")
