"""`minibroker timeline`: a controller's timeline in words, and the story of a failover."""
