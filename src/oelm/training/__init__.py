"""Training: one engine, its optimiser and schedules, its checkpoints, its timing."""
