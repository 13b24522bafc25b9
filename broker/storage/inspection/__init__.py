"""Readers of a stopped broker's files, which change nothing."""
