"""From a record to an acknowledged batch: accumulator, batches, partitioners, and the task that sends."""
