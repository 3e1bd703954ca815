"""Rotation by global position: a rank's rows of the tables of the whole sequence."""

import torch

from drumline.models.rope import Rope, rotate
from drumline.parallel.context.split import ContextSplit


def rotate_local(x_BTHK: torch.Tensor, rope: Rope, split: ContextSplit) -> torch.Tensor:
    """Turns a rank's queries or keys by the angles of their positions in the whole sequence.

    Args:
        x_BTHK: of this rank's tokens.
        rope: tables for every position of the whole sequence, 0 .. degree x T - 1.
        split: this rank's place.

    Returns:
        The turned tensor.

    Raises:
        ValueError: the tables are not those of the whole sequence.
    """
    num_tokens = x_BTHK.shape[1] * split.degree
    if rope.cos_TK2.shape[0] != num_tokens:
        raise ValueError(
            f"rotary tables have {rope.cos_TK2.shape[0]} positions, but {x_BTHK.shape[1]} tokens on each of "
            f"{split.degree} ranks are a sequence of {num_tokens}: a context-parallel rank needs all positions' tables"
        )
    positions = split.positions(num_tokens, x_BTHK.device)
    return rotate(x_BTHK, Rope(rope.cos_TK2[positions], rope.sin_TK2[positions]))
