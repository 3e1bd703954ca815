"""The loop: one step to read from top to bottom, set-up, metrics, and what watches.

In: a recipe without problems and a place among the ranks. Out: a run directory with metrics and commits.
"""

from drumline.train.folder import run_folder
from drumline.train.run import Outcome, run_rank

__all__ = ["Outcome", "run_folder", "run_rank"]
