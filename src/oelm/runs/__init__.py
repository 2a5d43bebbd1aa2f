"""What a run leaves behind: its folder and records, and the published figures that runs are compared with."""
