"""What is kept for the backward: activation checkpointing, and a meter of what is alive.

In: a decoder and the recipe's memory section. Out: the same decoder, whose blocks keep less.
"""

from drumline.memory.alive import AliveBytes
from drumline.memory.checkpointing import apply_activation_checkpointing

__all__ = ["AliveBytes", "apply_activation_checkpointing"]
