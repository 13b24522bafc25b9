"""What a broker does about each request: a dispatch table and one file per API family."""
