"""The generated parts of the documents: state diagrams, the table of rooms, and the access that each API needs.

The diagrams come from the tables in `controller/decisions/states`, `broker/groups/states.py` and
`broker/transactions/states.py`, the access from `broker/security/table.py`, the rooms from the first sentence of each
folder's `__init__.py`. `make diagrams` writes them, and a test fails if a document differs.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import TypeVar

from minibroker.broker.groups import states as group
from minibroker.broker.security.table import ACCESS
from minibroker.broker.transactions import states as transaction
from minibroker.controller.decisions.states import partition, replica
from minibroker.deploy.scenarios.words import ACTIONS, EVENTS, Form
from minibroker.protocol.apis import APIS

ROOT = Path(__file__).parents[1]
SECURITY = ROOT / "docs/security.md"
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
CONTROLLER = ROOT / "docs/internals/controller.md"
GROUPS = ROOT / "docs/internals/groups.md"
TRANSACTIONS = ROOT / "docs/internals/transactions.md"
SCENARIOS = ROOT / "docs/scenarios.md"
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


def access() -> str:
    """Return a table with the operations that each API needs, and what happens without them."""
    rows = ["| API | operation | on | without it |", "|---|---|---|---|"]
    for key, steps in sorted(ACCESS.items(), key=lambda row: APIS[row[0]].name):
        needs = dict.fromkeys(need for step in steps for need in step.needs)
        rows += [f"| {APIS[key].name} | {n.operation.shown} | {n.kind.shown} | {n.effect} |" for n in needs]
    return "\n".join(rows)


def sentences(forms: Sequence[Form]) -> str:
    """Return a table with each sentence of scenario files, its meaning, and where it runs."""
    rows = ["| sentence | meaning | runs |", "|---|---|---|"]
    rows += [f"| `{form.sentence}` | {form.meaning} | {', '.join(form.runners)} |" for form in forms]
    return "\n".join(rows)


BLOCKS = {
    SECURITY: {"access": access()},
    CONTROLLER: {
        "states of a partition": diagram(partition.VALID_PREVIOUS_STATES),
        "states of a replica": diagram(replica.VALID_PREVIOUS_STATES),
    },
    GROUPS: {"states of a group": diagram(group.VALID_PREVIOUS_STATES)},
    TRANSACTIONS: {"states of a transactional id": diagram(transaction.VALID_PREVIOUS_STATES)},
    ARCHITECTURE: {"rooms": rooms()},
    SCENARIOS: {"actions": sentences(ACTIONS), "events": sentences(EVENTS)},
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
