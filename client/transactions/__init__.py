"""Transactions of a producer: their states, the requests to their coordinator, and the user's context manager."""
