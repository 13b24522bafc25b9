"""The diagrams of the state machines in ARCHITECTURE.md, drawn from the tables in `controller/states` and
`broker/groups`.

`make diagrams` writes them into the document; a test fails where they are not what the tables say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from minibroker.broker.groups import states as group
from minibroker.controller.decisions.states import partition, replica

DOCUMENT = Path(__file__).parents[1] / "ARCHITECTURE.md"

S = TypeVar("S", bound=Enum)


def diagram(valid_previous_states: Mapping[S, frozenset[S]]) -> str:
    """Mermaid text: an arrow for each legal move, in the order in which the states are declared."""
    states = list(type(next(iter(valid_previous_states))))
    arrows = [
        f"    {source.value} --> {target.value}"
        for source in states
        for target in states
        if source in valid_previous_states[target]
    ]
    return "\n".join(["stateDiagram-v2", *arrows])


def drawn(document: str) -> str:
    """The document, with the diagrams as the tables have them."""
    for name, table in (
        ("partition", diagram(partition.VALID_PREVIOUS_STATES)),
        ("replica", diagram(replica.VALID_PREVIOUS_STATES)),
        ("group", diagram(group.VALID_PREVIOUS_STATES)),
    ):
        block = re.compile(rf"(?<=<!-- states of a {name} -->\n```mermaid\n).*?(?=\n```\n)", re.DOTALL)
        document, places = block.subn(table, document, count=1)
        assert places == 1, f"no place for the states of a {name}"
    return document


if __name__ == "__main__":
    DOCUMENT.write_text(drawn(DOCUMENT.read_text()))
