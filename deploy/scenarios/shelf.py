"""The library: classic failures as scenario files, by name."""

from __future__ import annotations

from pathlib import Path

from minibroker.deploy.scenarios.document import ScenarioError
from minibroker.deploy.scenarios.model import Scenario
from minibroker.deploy.scenarios.reading import read_scenario

LIBRARY = Path(__file__).parent / "library"


def names() -> list[str]:
    return sorted(path.stem for path in LIBRARY.glob("*.toml"))


def load(file: str) -> Scenario:
    """Return the scenario of a file, or of the library by its name. Raises ScenarioError."""
    path = LIBRARY / f"{file}.toml" if file in names() else Path(file)
    try:
        text = path.read_text()
    except OSError as error:
        raise ScenarioError(
            f"{file}: {error.strerror}; give a file, or a name that `minibroker scenario list` prints"
        ) from None
    except UnicodeDecodeError:
        raise ScenarioError(f"{file}: this is not text in UTF-8; give a scenario file") from None
    return read_scenario(text, file)
