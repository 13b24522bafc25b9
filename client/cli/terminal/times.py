"""Points in time as users write them: milliseconds since 1970, or ISO 8601."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LIMIT_MS = 1 << 62


def parse_time_ms(text: str) -> int | None:
    """Return milliseconds since 1970 for `1700000000000`, `2026-11-22`, `2026-11-22T10:30` or
    `2026-11-22T10:30:00.5+01:00`. None for anything else, including `2026`, which looks like a year. A time without a
    zone is UTC, as in Kafka's and Redpanda's tools."""
    if text.isascii() and text.isdecimal():
        is_year = len(text) == 4
        return int(text) if not is_year and len(text) <= 19 and int(text) < _LIMIT_MS else None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    since_epoch = (moment - _EPOCH) // timedelta(milliseconds=1)
    return since_epoch if since_epoch >= 0 else None


def hint(text: str) -> str:
    """Explain why `parse_time_ms` rejects a number of four digits; empty for other texts."""
    if len(text) == 4 and text.isascii() and text.isdecimal():
        return f". Four digits may be a year or milliseconds: write {text}-01-01 for the year, 0{text} for milliseconds"
    return ""
