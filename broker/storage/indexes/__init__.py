"""The indexes of a segment, of offsets, of times, and of aborted transactions."""
