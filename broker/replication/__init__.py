"""Leaders and followers: partitions, the ISR, fetchers, and the manager that handlers call."""
