"""The controller, and what connects a broker to ZooKeeper: sessions, registration, leadership, crash detection."""
