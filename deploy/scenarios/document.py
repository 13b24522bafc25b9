"""A TOML document that knows the line of each value, and the errors of scenario files.

Errors of wrong values need the line of the value. `tomllib` gives lines only for errors of syntax, so `lines_of` finds
them: it reads the headers and the keys of a document that `tomllib` has accepted.

TOML, because Python reads it without a dependency, and because it has no surprises in a file of times, names and
numbers. Rejected: YAML, whose readers know lines, but which needs a dependency, reads `no` as a boolean and `1:30` as
90, and depends on indentation that is lost when a scenario is pasted.
"""

from __future__ import annotations

import difflib
import itertools
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

from minibroker.protocol.errors import MinibrokerError

T = TypeVar("T")
Path = tuple[str | int, ...]

_HEADER = re.compile(r"\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_OF_SEVERAL = re.compile(r"\s*\[\[?\s*(topics|clients|steps)\b")
_KEY = re.compile(r"""\s*([A-Za-z0-9_-]+|"[^"]*"|'[^']*')\s*=(.*)$""")
_QUOTES = ('"""', "'''")


class ScenarioError(MinibrokerError, ValueError):
    """A scenario file is wrong, or cannot run here. The text names the file, the line, the value and the remedy."""


def lines_of(text: str) -> dict[Path, int]:
    """Return the line of each table and key of a valid document, counted from 1."""
    found: dict[Path, int] = {}
    counts: dict[str, int] = {}
    prefix: Path = ()
    closing: str | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if closing is not None:
            if closing in line:
                closing = None
            continue
        if header := _HEADER.match(line):
            name = header[2].strip("\"'")
            if header[1] == "[[":
                counts[name] = counts.get(name, -1) + 1
                prefix = (name, counts[name])
            else:
                first, *rest = name.split(".")
                prefix = (first, counts[first], *rest) if first in counts else (first, *rest)
            found[prefix] = number
        elif key := _KEY.match(line):
            found[(*prefix, key[1].strip("\"'"))] = number
            for quote in _QUOTES:
                if key[2].count(quote) == 1:
                    closing = quote
    return found


class Document(NamedTuple):
    """The content of a file, and the lines of its values."""

    name: str
    content: Mapping[str, Any]
    lines: Mapping[Path, int]

    def error(self, path: Path, message: str) -> ScenarioError:
        if path not in self.lines and (*path, 0) in self.lines:
            path = (*path, 0)
        while path and path not in self.lines:
            path = path[:-1]
        return ScenarioError(f"{self.name}:{self.lines.get(path, 1)}: {message}")


def read_document(text: str, name: str) -> Document:
    """Raises ScenarioError if the text is not TOML."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"at line (\d+)", str(error))
        number = line[1] if line else str(text.count("\n") + 1)
        said = re.sub(r" \(at line \d+, (column \d+)\)$", r", in \1", str(error))
        said = re.sub(r" \((at end of document)\)$", r", \1", said)
        rule = 'values are written as name = "text", name = 3 or name = true'
        if header := _OF_SEVERAL.match(_line(text, int(number))):
            rule = f"there may be several {header[1]}: write each as [[{header[1]}]] with two brackets"
        raise ScenarioError(f"{name}:{number}: not TOML: {said}; {rule}") from None
    return Document(name, content, lines_of(text))


def _line(text: str, number: int) -> str:
    return next(itertools.islice(text.splitlines(), number - 1, None), "")


class Table:
    """A table of the document, whose values are taken one by one. `end` rejects those that were not taken."""

    def __init__(self, document: Document, path: Path, content: object, what: str) -> None:
        self.document = document
        self.path = path
        self.what = what
        if not isinstance(content, dict):
            raise document.error(path, f"{what} is a table; write it below [{what}], one name = value per line")
        self._content: dict[str, Any] = content
        self._known: list[str] = []

    def error(self, name: str, message: str) -> ScenarioError:
        value = self._content.get(name)
        is_shown = name in self._content and not isinstance(value, dict | list)
        shown = f"{name} = {_shown(value)}: " if is_shown else ""
        return self.document.error((*self.path, name), f"{shown}{message}")

    def has(self, name: str) -> bool:
        return name in self._content

    def text(self, name: str, default: str | None = None) -> str:
        value = self._take(name, default, "give a text in quotes")
        if not isinstance(value, str) or not value:
            raise self.error(name, f'give a text in quotes, as in {name} = "..."')
        return value

    def parsed(self, name: str, parse: Callable[[str], T], default: str | None = None) -> T:
        """Return what `parse` makes of a text. Its ValueError says what is wrong."""
        text = self.text(name, default)
        try:
            return parse(text)
        except ValueError as error:
            raise self.error(name, str(error)) from None

    def texts(self, name: str) -> list[str]:
        value = self._take(name, [], "")
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise self.error(name, f'give a text or a list of texts, as in {name} = ["...", "..."]')
        return texts

    def number(self, name: str, default: int | None, least: int, most: int) -> int:
        value = self._take(name, default, f"give a whole number from {least} to {most}")
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(name, f"give a whole number from {least} to {most}")
        return value

    def truth(self, name: str, default: bool) -> bool:
        value = self._take(name, default, "")
        if not isinstance(value, bool):
            raise self.error(name, "give true or false, without quotes")
        return value

    def choice(self, name: str, default: str, choices: Collection[str]) -> str:
        value = self._take(name, default, "")
        if value not in choices:
            # In quotes, so that the text "1" is seen to differ from the number.
            quoted = {_shown(choice): choice for choice in choices}
            raise self.error(name, f"give one of {', '.join(quoted)}{meant(_shown(str(value)), quoted)}")
        return str(value)

    def settings(self, name: str, check: Callable[[dict[str, str]], object]) -> dict[str, str]:
        """Return a table of settings by Kafka's names; numbers and booleans become texts. `check` raises a ValueError
        that names the setting which is wrong."""
        value = self._take(name, {}, "")
        if not isinstance(value, dict) or any(isinstance(one, dict | list) for one in value.values()):
            raise self.error(name, f'give settings by name, as in {name} = {{ "min.insync.replicas" = 2 }}')
        texts = {key: str(one).lower() if isinstance(one, bool) else str(one) for key, one in value.items()}
        try:
            check(texts)
        except ValueError as error:
            wrong = max((key for key in texts if key in str(error)), key=len, default="")
            raise self.document.error((*self.path, name, wrong), str(error)) from None
        return texts

    def table(self, name: str) -> Table:
        return Table(self.document, (*self.path, name), self._take(name, {}, ""), name)

    def tables(self, name: str) -> list[Table]:
        value = self._take(name, [], "")
        if not isinstance(value, list):
            raise self.error(name, f"there may be several {name}: write [[{name}]] with two brackets")
        return [Table(self.document, (*self.path, name, number), one, name) for number, one in enumerate(value)]

    def known(self, *names: str) -> None:
        """Accept these optional names."""
        self._known += names

    def end(self) -> None:
        """Raises ScenarioError if a name is left that means nothing here."""
        for name in self._content:
            if name not in self._known:
                hint = meant(name, self._known) or f"; it has {', '.join(self._known)}"
                raise self.error(name, f"{self.what} has no {name}{hint}")

    def _take(self, name: str, default: object, rule: str) -> Any:
        self.known(name)
        value = self._content.get(name, default)
        if value is None:
            raise self.document.error((*self.path, name), f"{self.what} has no {name}: {rule}, as {name} = ...")
        return value


def _shown(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def meant(text: str, known: Iterable[str]) -> str:
    """Return a hint to the similar name, or nothing."""
    close = difflib.get_close_matches(text, list(known), 1)
    return f"; did you mean {close[0]}?" if close else ""
