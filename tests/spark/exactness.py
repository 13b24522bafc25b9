"""Whether two DataFrames have the same rows, each equally often."""

from __future__ import annotations

from pyspark.sql import DataFrame


def differences(found: DataFrame, expected: DataFrame) -> tuple[int, int]:
    """Return (missing rows, surplus rows)."""
    return expected.exceptAll(found).count(), found.exceptAll(expected).count()
