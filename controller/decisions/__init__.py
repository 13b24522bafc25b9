"""The controller's decisions: pure functions of the cluster state that return Plans."""
