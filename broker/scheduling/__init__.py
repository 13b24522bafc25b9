"""Work that waits or takes turns: the purgatory and its timers, slices, sleeps, supervised tasks."""
