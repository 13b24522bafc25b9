"""The transaction coordinator: producer ids and epochs, the state of each transactional id, markers, time-outs."""
