"""Registration in ZooKeeper, the race for /controller, and crash detection."""
