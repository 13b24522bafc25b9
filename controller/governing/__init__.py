"""Who governs: registration in ZooKeeper, the race for /controller, crash detection."""
