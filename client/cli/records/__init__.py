"""The commands that produce and consume records, and the formats they read and print."""
