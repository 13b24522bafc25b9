"""What a running cluster, or the files of a stopped one, say about it."""
