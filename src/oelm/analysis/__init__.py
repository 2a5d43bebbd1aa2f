"""What the records of runs show: reading them, comparing arms, judging hypotheses. Reads records, never logs."""

from ..errors import AnalysisError
from .analyse import Analysis, analyse
from .load import load_run, load_runs
from .run import LeftOut, Run

__all__ = ["Analysis", "AnalysisError", "LeftOut", "Run", "analyse", "load_run", "load_runs"]
