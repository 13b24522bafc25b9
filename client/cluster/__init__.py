"""The client's view of the cluster: connections, metadata, coordinators, requests to leaders, life cycle."""
