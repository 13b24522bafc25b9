"""Quotas of users and clients: the limit that applies, the measured rates, throttling (KIP-13, KIP-124, KIP-257)."""
