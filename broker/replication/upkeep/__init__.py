"""Background work on replicas: retention, compaction, moves, healing, checkpoints."""
