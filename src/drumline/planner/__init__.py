"""What a run costs before it starts: operations today; memory, traffic and time later. Imports no torch.

In: a recipe's model and layout, an accelerator. Out: counts in FLOPs, bytes and seconds.
"""

from drumline.planner.flops import Flops, flops_per_token
from drumline.planner.stages import stage_layers

__all__ = ["Flops", "flops_per_token", "stage_layers"]
