"""The lab: every experiment by name, whole matrices of runs, launchers, and what can be seen and done from records."""
