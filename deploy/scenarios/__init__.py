"""Scenario files: a cluster, its clients, faults, and the promises to check, run on virtual time or for real."""
