"""Options, output, errors and hints, shared by all commands."""
