"""Start runs as processes of this machine (`local`, `forked`) or as Slurm jobs (`slurm`)."""
