"""Logs on disk: segments, indexes, checkpoints, flushing. Begin with `log`."""
