"""Workloads that measure a cluster or break it, with a verdict on lost records."""
