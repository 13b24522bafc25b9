"""The client's commands, such as topics, produce, consume and groups."""
