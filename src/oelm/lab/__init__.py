"""The lab: experiments by name, matrices of runs, launchers, and the state of runs as their records show it."""
