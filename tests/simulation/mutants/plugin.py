"""Plants a mutant for a whole run of pytest: `MUTANT=name python -m pytest -p tests.simulation.mutants.plugin ...`

It is planted before anything is collected. A test module that imports a function by its name gets the planted one
then, and the mutants' own imports have loaded every module in which something is replaced.
"""

from __future__ import annotations

import os

import pytest

from tests.simulation.mutants import planted

VARIABLE = "MUTANT"


def pytest_configure(config: pytest.Config) -> None:
    mutant = planted(os.environ.get(VARIABLE))
    mutant.__enter__()
    config.add_cleanup(lambda: mutant.__exit__(None, None, None))
