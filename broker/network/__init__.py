"""Sockets to requests and back: acceptors, processors, dialects, request channels and handler tasks."""
