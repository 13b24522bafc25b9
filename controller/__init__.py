"""The controller, and what ties a broker to ZooKeeper: sessions, registration, leadership, crash detection."""
