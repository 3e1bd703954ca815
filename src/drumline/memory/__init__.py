"""What is kept for the backward: activation checkpointing.

In: a decoder and the recipe's memory section. Out: the same decoder, whose blocks keep less.
"""

from drumline.memory.checkpointing import apply_activation_checkpointing

__all__ = ["apply_activation_checkpointing"]
