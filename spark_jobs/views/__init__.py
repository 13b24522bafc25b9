"""Views of a topic: batch, stream, and the place where both are served."""
