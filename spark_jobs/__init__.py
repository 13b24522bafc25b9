"""Topics in Spark: a data source for batches and streams, and jobs that use it.

File map:

- The data source: source.py (Spark's classes) -> options.py and offsets.py (pure). On the driver bounds.py (where a
  query begins and ends) -> log_client.py (blocking) -> look_ups.py; in tasks reading.py -> arrow.py, and writing.py.
  connecting.py serves both sides. For streams initial_offsets.py (where they begin) and progress.py (lag). session.py
  starts Spark.
- Tables, filled exactly once: manifests.py (what is in one; needs no Spark), table_reader.py, table_writer.py, and
  checkpoint.py (reads Spark's checkpoints).
- Jobs: cli.py -> ingest.py, kappa.py, lambda_.py -> jobs.py (what they share). For the last two views.py (what is
  computed), view_stream.py (a stream that keeps a version of it) and serving.py (which version is served).
"""
