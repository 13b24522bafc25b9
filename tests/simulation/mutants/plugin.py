"""Plants a mutant for a whole run of pytest: `MUTANT=name python -m pytest -p tests.simulation.mutants.plugin ...`

It is planted before anything is collected. A test module that imports a function by its name gets the planted one
then, and the mutants' own imports have loaded every module in which something is replaced.
"""

from __future__ import annotations

import os
from contextlib import ExitStack

import pytest

from tests.simulation.mutants import planted

VARIABLE = "MUTANT"


def pytest_configure(config: pytest.Config) -> None:
    run = ExitStack()
    run.enter_context(planted(os.environ.get(VARIABLE)))
    config.add_cleanup(run.close)
