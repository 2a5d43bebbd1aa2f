"""Launchers: how the runs of a matrix are started, locally or through Slurm."""
