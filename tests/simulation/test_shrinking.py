"""The judge of deletions lets the legal ones pass, and no other."""

import pytest

from tests.simulation.shrinking import Batch, illegal

NOW_MS = 10_000
BATCHES = [Batch(0, 10, 100, 1_000), Batch(10, 20, 100, 5_000), Batch(20, 30, 100, 2_000), Batch(30, 40, 100, 9_000)]


@pytest.mark.parametrize(
    ("start", "retention_ms", "retention_bytes", "is_legal"),
    [
        (0, None, None, True),
        (10, None, None, False),
        (20, None, 200, True),
        (20, None, 201, False),
        (30, 4_999, None, True),
        (30, 5_000, None, False),
        (30, 5_000, 200, True),
        (40, 0, None, True),
    ],
)
def test_a_log_may_begin_where_what_went_is_too_old_or_too_much(
    start: int, retention_ms: int | None, retention_bytes: int | None, is_legal: bool
) -> None:
    assert (illegal(BATCHES, start, NOW_MS, retention_ms, retention_bytes) is None) == is_legal
