"""Opening a log after any kind of stop, and whether its directory can be trusted."""
