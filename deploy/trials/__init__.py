"""Workloads that measure a cluster or break it, with a verdict on what was lost."""
