"""Rotary position embedding: each pair (i, i + K/2) of a head turns by an angle that grows with the token's position.

    angle[t, i] = t * f_i,   f_i = theta ** (-2 i / K)
    (a, b) -> (a cos - b sin, b cos + a sin)

Llama 3.1 slows low frequencies: wavelengths longer than original / low_freq_factor by `factor`, those shorter than
original / high_freq_factor not at all, and the ones between by interpolation. Tables are fp32 whatever the compute
dtype, since bf16 cannot tell apart positions beyond 256.
Sources: Su et al. 2021, arXiv:2104.09864; the scaling is that of Meta's llama-models, `apply_scaling`.

T tokens, K head width.
"""

import math
from dataclasses import dataclass

import torch

from drumline.recipe.sections import Model, RopeScaling


@dataclass(frozen=True)
class Rope:
    """Cosine and sine of every position's angles, fp32 [T, K/2]."""

    cos_TK2: torch.Tensor
    sin_TK2: torch.Tensor


def tables(model: Model, num_tokens: int, device: torch.device | str) -> Rope:
    """Tables for positions 0 .. num_tokens - 1.

    Args:
        model: gives head_dim, rope_theta and rope_scaling.
        num_tokens: T, the row's length.
        device: where the tables are made.

    Returns:
        The tables, fp32.
    """
    exponent = torch.arange(0, model.head_dim, 2, dtype=torch.int64, device=device).float() / model.head_dim
    frequency = 1.0 / model.rope_theta**exponent
    if model.rope_scaling is not None:
        frequency = _scaled(frequency, model.rope_scaling)
    position = torch.arange(num_tokens, dtype=torch.int64, device=device).float()
    angle = torch.outer(position, frequency)
    return Rope(angle.cos(), angle.sin())


def rotate(x_BTHK: torch.Tensor, rope: Rope) -> torch.Tensor:
    """Turns queries or keys by their position's angles.

    Args:
        x_BTHK: any float dtype; positions are rows 0 .. T - 1.
        rope: tables of at least T positions.

    Returns:
        The turned tensor in the same dtype; bf16 is turned in fp32 and rounded once.
    """
    num_tokens = x_BTHK.shape[1]
    dtype = torch.promote_types(x_BTHK.dtype, torch.float32)
    cos = rope.cos_TK2[:num_tokens, None, :].to(dtype)
    sin = rope.sin_TK2[:num_tokens, None, :].to(dtype)
    a, b = x_BTHK.to(dtype).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x_BTHK.dtype)


def _scaled(frequency: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    wavelength = 2 * math.pi / frequency
    longest_kept = scaling.original_max_seq_len / scaling.high_freq_factor
    shortest_slowed = scaling.original_max_seq_len / scaling.low_freq_factor
    share_kept = (scaling.original_max_seq_len / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    between = (1 - share_kept) * frequency / scaling.factor + share_kept * frequency
    scaled = torch.where(wavelength > shortest_slowed, frequency / scaling.factor, between)
    return torch.where(wavelength < longest_kept, frequency, scaled)
