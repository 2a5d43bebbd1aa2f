"""Analyse the records of runs: read them, compare arms, judge hypotheses. Logs are never read."""

from ..errors import AnalysisError
from .analyse import Analysis, analyse
from .load import load_run, load_runs
from .run import LeftOut, Run

__all__ = ["Analysis", "AnalysisError", "LeftOut", "Run", "analyse", "load_run", "load_runs"]
