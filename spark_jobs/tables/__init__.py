"""Parquet tables that are written exactly once: manifests, checkpoints, reader and writer."""
