"""What the controller decides: pure functions of the cluster state and what was gathered; they return Plans."""
