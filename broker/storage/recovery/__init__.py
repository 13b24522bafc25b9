"""Opening a log after any kind of stop, and whether its data directory can be trusted."""
