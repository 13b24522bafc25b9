"""The broker: one process that answers requests, replicates partitions and stores their logs."""
