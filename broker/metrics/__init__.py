"""Prometheus metrics, summarized log lines, and the file of the controller's timeline."""
