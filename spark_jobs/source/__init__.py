"""Spark's data source `minibroker`: options, offsets, reading and writing."""
