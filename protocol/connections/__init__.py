"""Connections to brokers: framing, correlation ids, time limits, proofs between brokers."""
