"""Membership in a consumer group: joining, heartbeats, assignment, committed offsets."""
