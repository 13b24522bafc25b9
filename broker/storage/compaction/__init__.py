"""Compaction of a log: what can be cleaned, the key map, the cleaning, the swap of segments."""
