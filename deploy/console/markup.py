"""HTML and SVG as text. Pure.

Names of topics, groups and clients are chosen by strangers, so text is escaped unless it is Markup, which only this
module makes. Rejected: a template engine, another dependency for three pages, whose templates mypy cannot check.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

from minibroker.client.cli.terminal.hints import pastable
from minibroker.protocol.words import printable


class Markup(str):
    """HTML, as opposed to text that must be escaped."""

    __slots__ = ()


Content = str | int | Iterable["Content"] | None

_LINK = re.compile(r"\[([^\[\]]+)\]\([\w.#/-]+\)")
_VOID = frozenset({"input", "link", "meta"})


def markup(*contents: Content) -> Markup:
    """Join contents: Markup as it is, other text and numbers escaped, None left out."""
    return Markup("".join(_text(content) for content in contents))


def element(tag: str, *contents: Content, **attributes: str | int | bool | None) -> Markup:
    """Return an element. Attributes that are None or False are left out; `class_` means class, `data_x` means
    data-x."""
    shown = "".join(_attribute(name, value) for name, value in attributes.items())
    return Markup(f"<{tag}{shown}>" if tag in _VOID else f"<{tag}{shown}>{markup(*contents)}</{tag}>")


def in_words(text: str) -> Markup:
    """Return a sentence of messages and documentation: as a command what stands in backquotes, with the options of the
    console's own command line, and of a link to a document, which the console does not serve, the words."""
    parts = pastable(_LINK.sub(r"\1", text)).split("`")
    if len(parts) % 2 == 0:  # a backquote without its pair is text
        parts[-2:] = ["`".join(parts[-2:])]
    return markup(*(element("code", part) if at % 2 else part for at, part in enumerate(parts)))


def _text(content: Content) -> str:
    if content is None:
        return ""
    if isinstance(content, Markup):
        return content
    if isinstance(content, str | int):
        return escape(printable(str(content)))
    return "".join(map(_text, content))


def _attribute(name: str, value: str | int | bool | None) -> str:
    if value is None or value is False:
        return ""
    shown = name.rstrip("_").replace("_", "-")
    return f" {shown}" if value is True else f' {shown}="{escape(printable(str(value)))}"'
