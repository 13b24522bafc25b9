"""The documents say what is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("protocol", "controller", "broker", "client", "deploy", "spark_jobs")
MAP = (ROOT / "ARCHITECTURE.md").read_text().partition("## File map")[2]
MODULES = [
    "minibroker/__init__.py",
    "minibroker/__main__.py",
    *sorted(
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if path.name != "__init__.py"
    ),
]


@pytest.mark.parametrize("module", MODULES)
def test_every_module_has_a_line_in_the_file_map(module: str) -> None:
    assert re.search(rf"^- `{re.escape(module)}`: \S", MAP, re.MULTILINE)


def test_the_file_map_names_no_module_that_is_gone() -> None:
    named = re.findall(r"^- `([^`]+\.py)`:", MAP, re.MULTILINE)
    assert [name for name in named if not (ROOT / name).exists()] == []


LABELS = [f"P{step}" for step in range(1, 8)] + [f"C{step}" for step in range(1, 7)]


@pytest.mark.parametrize("label", LABELS)
def test_every_label_of_the_two_walks_stands_in_the_code(label: str) -> None:
    sources = [path.read_text() for package in ("broker", "controller") for path in (ROOT / package).rglob("*.py")]
    assert any(re.search(rf"\b{label}\b", source) for source in sources), label
