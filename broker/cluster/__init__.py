"""The broker as a member of the cluster: cached metadata, forwarding to the controller, controlled shutdown."""
