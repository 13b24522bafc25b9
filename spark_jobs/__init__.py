"""Spark jobs that read the logs (to come)."""
