"""Logs on disk. See `log` for the rule that holds them together."""
