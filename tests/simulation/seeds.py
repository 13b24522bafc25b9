"""Which seeds a test of the virtual World is run with."""

from __future__ import annotations

import pytest


def every_seed(seeds: range) -> pytest.MarkDecorator:
    """The test's argument `seed` is each of these: the first in `make test`, the others in `make test-all` only."""
    first, *others = seeds
    return pytest.mark.parametrize("seed", [first, *(pytest.param(seed, marks=pytest.mark.slow) for seed in others)])
