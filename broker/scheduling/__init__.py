"""Work that must wait or take turns: the purgatory and its timers, slices, sleeps, supervised tasks."""
