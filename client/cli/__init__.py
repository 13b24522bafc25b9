"""The client's commands: topics, produce, consume, bench."""
