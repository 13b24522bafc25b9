"""A cluster as processes of this machine: ZooKeeper and N brokers, started, broken and stopped."""
