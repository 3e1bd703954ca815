"""Stochastic rounding to bf16: up or down with the probability that makes the result right on average.

    bf16(x) = truncate(bits(x) + r),   r uniform in [0, 2**16)       the bits that go decide how likely up is

An increment that is smaller than half a unit in the last place is lost by rounding to nearest, each time; here it is
kept on average. The random numbers come from whoever rounds, so that they can be a function of the logical element.
Source: Gupta et al. 2015, arXiv:1502.02551, section 3.
"""

import torch


def round_stochastically(x: torch.Tensor, halves: torch.Tensor) -> torch.Tensor:
    """Rounds fp32 to bf16.

    Args:
        x: fp32; what is not finite stays as it is.
        halves: integers of x's shape, each in [0, 2**16).

    Returns:
        bf16 of x's shape. What bf16 can hold is returned exactly.
    """
    raised = x.view(torch.int32) + halves.to(torch.int32)
    return torch.where(x.isfinite(), raised.bitwise_and_(-(1 << 16)).view(torch.float32), x).to(torch.bfloat16)
