"""The loss of logits that are cut into blocks of the vocabulary.

    m = max l,   z = sum exp(l - m)                         of a block
    m = max(m1, m2),   z = z1 exp(m1 - m) + z2 exp(m2 - m)  of two, up a binary tree
    loss = log z + m - l_label

R rows, V logits of a block, 3 numbers of a row: m, z, and the label's logit or 0 where another block has it.
"""

from collections.abc import Sequence

import torch


def masses(logits_RV: torch.Tensor, rows_R: torch.Tensor, is_here_R: torch.Tensor) -> torch.Tensor:
    """What a block adds to the loss.

    Args:
        logits_RV: fp32 at least; -inf counts for nothing.
        rows_R: the label's place in the block, any where it has none.
        is_here_R: whether it has one.

    Returns:
        [3, R].
    """
    greatest_R = logits_RV.amax(1)
    mass_R = (logits_RV - greatest_R[:, None]).exp_().sum(1)
    label_R = logits_RV.gather(1, rows_R[:, None])[:, 0].masked_fill(~is_here_R, 0.0)
    return torch.stack((greatest_R, mass_R, label_R))


def merged(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The masses of blocks, a power of two of them, up the tree: [3, R]."""
    parts = list(parts)
    while len(parts) > 1:
        parts = [_pair(first, second) for first, second in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def losses(masses_3R: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of each row, and its log-sum-exp."""
    greatest_R, mass_R, label_R = masses_3R
    lse_R = mass_R.log() + greatest_R
    return lse_R - label_R, lse_R


def gradient_(
    logits_RV: torch.Tensor, lse_R: torch.Tensor, rows_R: torch.Tensor, is_here_R: torch.Tensor
) -> torch.Tensor:
    """softmax - onehot of a block, in place of its logits."""
    grad_RV = logits_RV.sub_(lse_R[:, None]).exp_()
    return grad_RV.scatter_add_(1, rows_R[:, None], -is_here_R[:, None].to(grad_RV.dtype))


def _pair(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    greatest_R = torch.maximum(first[0], second[0])
    mass_R = first[1] * (first[0] - greatest_R).exp() + second[1] * (second[0] - greatest_R).exp()
    return torch.stack((greatest_R, mass_R, first[2] + second[2]))
