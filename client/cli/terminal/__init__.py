"""Shared by all commands: options, output, errors, hints."""
