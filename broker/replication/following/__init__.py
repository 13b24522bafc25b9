"""The follower's side: copying partitions from the brokers that lead them."""
