"""From a partition to the application: positions, the task that fetches ahead, records."""
