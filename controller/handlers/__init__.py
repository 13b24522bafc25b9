"""What a tenure does about each event, a module per family: read, decide, execute, and decide again on conflicts."""
