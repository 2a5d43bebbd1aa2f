"""Building models: from a checkpoint or Hub name, or small random ones of every family."""
