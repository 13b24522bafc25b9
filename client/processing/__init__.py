"""Read-process-write: the results of a user's function."""
