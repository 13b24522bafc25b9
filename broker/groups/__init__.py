"""The group coordinator: members of consumer groups, their generations, and their committed offsets."""
