"""Handlers of administrative requests, one module per family."""
