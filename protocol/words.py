"""Numbers, lists and values of clients in sentences for users."""

from collections.abc import Iterable


def plural(number: int, noun: str, of_many: str = "") -> str:
    """Return the noun in singular or plural. `of_many`: the plural if it is not the noun with an s."""
    return noun if number == 1 else of_many or noun + "s"


def counted(number: int, noun: str, of_many: str = "") -> str:
    """`1 partition`, `2,000 partitions`."""
    return f"{number:,} {plural(number, noun, of_many)}"


BYTE_UNITS = ((10**9, "GB"), (10**6, "MB"), (10**3, "kB"), (1, "bytes"))


def in_bytes(size: int) -> str:
    """`12 bytes`, `1.2 GB`."""
    unit, name = next((unit, name) for unit, name in BYTE_UNITS if size >= unit or unit == 1)
    return f"{size:,} {name}" if unit == 1 else f"{size / unit:,.1f} {name}"


def listed(items: Iterable[object]) -> str:
    """`1`, `1 and 2`, `1, 2 and 3`."""
    *first, last = [str(item) for item in items] or [""]
    return f"{', '.join(first)} and {last}" if first else last


def all_of(noun: str, items: Iterable[object]) -> str:
    """`broker 1`, `brokers 1 and 2`."""
    shown = list(items)
    return f"{plural(len(shown), noun)} {listed(shown)}"


def printable(text: str) -> str:
    r"""Return the text with line breaks, control characters and other unprintable ones as escapes such as \x1b. Names
    of groups, members and clients may contain any characters."""
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def says_full_disk(reason: str) -> bool:
    """Whether a log directory failed for this reason because its disk, or its user's quota, is used up (ENOSPC,
    EDQUOT): nothing is to be repaired then."""
    return "No space left" in reason or "quota exceeded" in reason
