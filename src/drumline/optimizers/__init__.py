"""Optimizers, the learning rate over steps, and clipping.

In: a model's parameters and the recipe's sections. Out: torch optimizers, and pure functions of the step.
"""

from drumline.optimizers.adamw import build_adamw, clip, local_sum_of_squares, materialize_states
from drumline.optimizers.schedule import learning_rate

__all__ = ["build_adamw", "clip", "learning_rate", "local_sum_of_squares", "materialize_states"]
