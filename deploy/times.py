"""Times as people write them in commands, forms and scenario files."""

import re

_TIME = re.compile(r"(\d+(?:\.\d+)?) ?(ms|s|min)")
_SECONDS = {"ms": 0.001, "s": 1.0, "min": 60.0}


def parse_time(text: str) -> float:
    """Return seconds. Raises ValueError with the rule."""
    matched = _TIME.fullmatch(text.strip())
    if not matched:
        raise ValueError('a time is a number with ms, s or min, as in "500 ms" or "2 s"')
    return float(matched[1]) * _SECONDS[matched[2]]
