"""The seeds of tests on the virtual World."""

from __future__ import annotations

import pytest


def every_seed(seeds: range) -> pytest.MarkDecorator:
    """Run the test with each seed as its argument `seed`: the first in `make test`, the others only in `make
    test-all`."""
    first, *others = seeds
    return pytest.mark.parametrize("seed", [first, *(pytest.param(seed, marks=pytest.mark.slow) for seed in others)])
