"""Times as people write them in commands, forms and scenario files."""

import re

_TIME = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(ms|s|min|m|h)")
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3_600.0}


def parse_time(text: str) -> float:
    """Return seconds. Raises ValueError with the rule."""
    matched = _TIME.fullmatch(text.strip())
    if not matched:
        raise ValueError('a time is a number with ms, s, min or h, as in "500 ms" or "2 s"')
    return float(matched[1]) * _SECONDS[matched[2]]
