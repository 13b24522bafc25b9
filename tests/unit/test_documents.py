"""The documents match the code."""

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

import minibroker
from tests import documents
from tests.generated_documents import ARCHITECTURE, BLOCKS, PARTS, generated
from tests.settings_reference import reference

ROOT = Path(__file__).parents[2]
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
INTERNALS = [ARCHITECTURE, *sorted((ROOT / "docs/internals").glob("*.md"))]
STEPS = re.findall(r"^- \*\*([A-Z]\d+)\*\* `([^`]+)` `([^`]+)`", ARCHITECTURE.read_text(), re.MULTILINE)
WALKS = {"P": 7, "C": 6, "R": 7, "M": 9, "T": 11}
LABELS = [f"{walk}{step}" for walk, steps in WALKS.items() for step in range(1, steps + 1)]


def test_architecture_can_be_read_in_an_afternoon() -> None:
    assert len(ARCHITECTURE.read_bytes()) <= 40_000


@pytest.mark.parametrize("page", INTERNALS, ids=lambda page: page.name)
def test_every_path_that_is_named_exists(page: Path) -> None:
    named = re.findall(r"`([\w.-]+/[\w./-]*\w)(?:::\w+)?`", page.read_text())
    ours = [path for path in named if path.partition("/")[0] in (*PARTS, "tests", "docs", "minibroker")]
    assert ours
    assert [path for path in ours if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("page", BLOCKS, ids=lambda page: page.name)
def test_diagrams_and_rooms_are_what_the_code_says(page: Path) -> None:
    assert page.read_text() == generated(page, page.read_text()), "run `make diagrams`"


def test_a_missing_arrow_is_drawn() -> None:
    page = ROOT / "docs/internals/controller.md"
    text = page.read_text()
    arrow = "    OfflinePartition --> OnlinePartition\n"
    assert text.count(arrow) == 1
    assert generated(page, text.replace(arrow, "")) == text


@pytest.mark.parametrize(("label", "path", "name"), STEPS, ids=lambda value: value if len(value) <= 3 else "")
def test_every_step_of_the_walks_names_a_function_of_its_file(label: str, path: str, name: str) -> None:
    text = (ROOT / path).read_text()
    scope: ast.AST = ast.parse(text)
    for part in name.split("."):
        found = [node for node in ast.walk(scope) if isinstance(node, ast.stmt) and getattr(node, "name", None) == part]
        assert found, f"{label}: {path} has no {name}"
        scope = found[0]
    if label in LABELS:
        assert re.search(rf"\b{label}\b", text), f"{path} has no comment {label}"


def test_every_label_of_the_code_has_a_step() -> None:
    assert [label for label in LABELS if label not in {step[0] for step in STEPS}] == []


def test_the_reference_of_settings_is_what_the_code_says() -> None:
    assert (ROOT / "docs/settings.md").read_text() == reference(), "run `make settings`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", documents.PAGES, ids=lambda page: page.name)
def test_every_python_block_says_how_it_is_run(page: Path) -> None:
    """`tests/integration/test_documented_programs.py` runs them, and `test_secured_document.py` the secured ones."""
    text = page.read_text()
    secured = text.count("<!-- secured -->\n```python\n")
    assert len(documents.programs_of(page)) + secured == text.count("```python\n")


def test_the_readme_leads_to_every_page_and_is_short() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"](docs/{page.name})" not in readme] == []
    assert len(readme.splitlines()) <= 250


@pytest.mark.parametrize("page", documents.PAGES, ids=lambda page: page.name)
def test_every_command_line_has_a_command_and_flags_that_exist(page: Path) -> None:
    application = typer.main.get_command(minibroker.application())
    text = page.read_text().replace("\\\n", " ")
    for line in re.findall(r"^    (?:\$ )?minibroker ([^|>&#;\n]*)", text, re.MULTILINE):
        _parse(application, [word for word in shlex.split(line) if word != "..."])


def _parse(command: Any, arguments: list[str], parent: Any = None) -> None:
    with command.make_context(command.name, arguments, parent) as context:
        if hasattr(command, "resolve_command"):
            _, subcommand, left = command.resolve_command(context, [*context._protected_args, *context.args])
            _parse(subcommand, left, context)
