"""The generated parts of the documents: state diagrams and the table of rooms.

The diagrams come from the tables in `controller/decisions/states` and `broker/groups/states.py`, the rooms from the
first sentence of each folder's `__init__.py`. `make diagrams` writes them, and a test fails if a document differs.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import TypeVar

from minibroker.broker.groups import states as group
from minibroker.controller.decisions.states import partition, replica

ROOT = Path(__file__).parents[1]
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
CONTROLLER = ROOT / "docs/internals/controller.md"
GROUPS = ROOT / "docs/internals/groups.md"
PARTS = ("broker", "client", "controller", "deploy", "protocol", "spark_jobs")

S = TypeVar("S", bound=Enum)


def diagram(valid_previous_states: Mapping[S, frozenset[S]]) -> str:
    """Return Mermaid text with an arrow for each legal move, in the order of the states' declaration."""
    states = list(type(next(iter(valid_previous_states))))
    arrows = [
        f"    {source.value} --> {target.value}"
        for source in states
        for target in states
        if source in valid_previous_states[target]
    ]
    return "```mermaid\n" + "\n".join(["stateDiagram-v2", *arrows]) + "\n```"


def rooms() -> str:
    """Return a table with each folder of the product and the first paragraph of its docstring."""
    rows = ["| room | purpose |", "|---|---|"]
    for part in PARTS:
        for init in sorted((ROOT / part).rglob("__init__.py"), key=lambda path: path.parent.parts):
            docstring = ast.get_docstring(ast.parse(init.read_text())) or ""
            purpose = " ".join(docstring.partition("\n\n")[0].split())
            rows.append(f"| `{init.parent.relative_to(ROOT)}` | {purpose} |")
    return "\n".join(rows)


BLOCKS = {
    CONTROLLER: {
        "states of a partition": diagram(partition.VALID_PREVIOUS_STATES),
        "states of a replica": diagram(replica.VALID_PREVIOUS_STATES),
    },
    GROUPS: {"states of a group": diagram(group.VALID_PREVIOUS_STATES)},
    ARCHITECTURE: {"rooms": rooms()},
}


def generated(page: Path, text: str) -> str:
    """Return the page's text with all blocks generated anew. A block begins with `<!-- NAME -->` and ends with
    `<!-- end -->`."""
    for name, block in BLOCKS[page].items():
        begin, end = f"<!-- {name} -->\n", "<!-- end -->\n"
        assert text.count(begin) == 1, f"{page.name} has {text.count(begin)} places for {name}"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{block}\n{end}{rest.partition(end)[2]}"
    return text


if __name__ == "__main__":
    for page in BLOCKS:
        page.write_text(generated(page, page.read_text()))
