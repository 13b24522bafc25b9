"""Plants a mutant for a whole run of pytest: `MUTANT=name python -m pytest -p tests.simulation.mutants.plugin ...`

The mutant is planted before collection. Test modules that import a replaced function thus import its replacement. All
modules with replaced functions are loaded by then, because the mutants import them.
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
