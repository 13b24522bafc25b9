"""From a partition to the application's hands: positions, the task that fetches ahead, records."""
