"""Views of a topic: a batch job, a stream, and the file that says which version is served."""
