"""The documents say what is there."""

import re
from pathlib import Path

import pytest

from tests import documents
from tests.settings_reference import reference

ROOT = Path(__file__).parents[2]
LABELS = [f"{walk}{step}" for walk, steps in {"P": 7, "C": 6, "R": 7, "M": 9}.items() for step in range(1, steps + 1)]


@pytest.mark.parametrize("label", LABELS)
def test_every_label_of_the_walks_stands_in_the_first_file_that_its_step_names(label: str) -> None:
    step = re.search(rf"^- \*\*{label}\*\* `([^`]+\.py)`", (ROOT / "ARCHITECTURE.md").read_text(), re.MULTILINE)
    assert step is not None
    assert re.search(rf"\b{label}\b", (ROOT / step[1]).read_text())


def test_the_reference_of_settings_is_what_the_code_says() -> None:
    assert (ROOT / "docs/settings.md").read_text() == reference(), "run `make settings`"


PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", documents.PAGES, ids=lambda page: page.name)
def test_every_python_block_says_how_it_is_run(page: Path) -> None:
    """`tests/integration/test_documented_programs.py` runs them."""
    assert len(documents.programs_of(page)) == page.read_text().count("```python\n")


def test_the_readme_leads_to_every_page_and_is_short() -> None:
    readme = (ROOT / "README.md").read_text()
    assert [page.name for page in (ROOT / "docs").glob("*.md") if f"](docs/{page.name})" not in readme] == []
    assert len(readme.splitlines()) <= 250
