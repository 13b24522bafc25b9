"""The logs in Spark: a data source for batch and streaming, and what its jobs have in common.

File map:

- The data source: source.py (Spark's classes) -> options.py and offsets.py (pure), reading.py and writing.py (the
  client, blocking). For streams initial_offsets.py (where they begin) and progress.py (lag). session.py starts Spark.
- Tables, filled exactly once: manifests.py (what is in one; needs no Spark), table_reader.py, table_writer.py, and
  checkpoint.py (what Spark's own says).
- Jobs: cli.py -> ingest.py, kappa.py, lambda_.py -> jobs.py (what they share). For the last two views.py (what is
  computed), view_stream.py (a stream that keeps a version of it) and serving.py (which version is served).
"""
