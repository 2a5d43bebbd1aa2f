"""Built-in synthetic data, for runs that need no download."""
