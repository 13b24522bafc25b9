"""Injected faults: a World that fails as a file says, for brokers that the launcher starts with `--faults FILE`."""
