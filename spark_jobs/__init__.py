"""The logs in Spark: a data source for batch and streaming, and what its jobs have in common.

File map: source.py (Spark's classes) -> options.py and offsets.py (pure) and reading.py, writing.py (the
client, blocking); initial_offsets.py and progress.py for streams; session.py starts Spark.
"""
