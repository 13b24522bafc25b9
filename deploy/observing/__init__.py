"""Status of a running cluster, and the files of a stopped one."""
