"""Requests that cannot be answered yet: what they wait for, and until when."""
