"""Topics in Spark: a data source for batches and streams, and jobs that use it."""
