"""One function for each API, found through a dispatch table."""
