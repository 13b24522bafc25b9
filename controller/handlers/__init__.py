"""The handling of events, one module per family: read, decide, execute, and decide again on conflicts."""
