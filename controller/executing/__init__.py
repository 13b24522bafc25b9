"""Effects of decisions: reads from ZooKeeper, writes under the controller's epoch, requests to brokers."""
