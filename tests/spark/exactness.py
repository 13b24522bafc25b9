"""Two DataFrames hold the same rows, each as often."""

from __future__ import annotations

from pyspark.sql import DataFrame


def differences(found: DataFrame, expected: DataFrame) -> tuple[int, int]:
    """(rows that are missing, rows that are too many)"""
    return expected.exceptAll(found).count(), found.exceptAll(expected).count()
