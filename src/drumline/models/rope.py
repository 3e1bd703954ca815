"""Rotary position embedding: each pair (i, i + K/2) of a head turns by an angle that grows with the token's position.

    angle[t, i] = t * f_i,   f_i = theta ** (-2 i / K)
    (a, b) -> (a cos - b sin, b cos + a sin)

Llama 3.1 slows low frequencies: wavelengths longer than original / low_freq_factor by `factor`, those shorter than
original / high_freq_factor not at all, and the ones between by interpolation. Tables are fp32 whatever the compute
dtype, since bf16 cannot tell apart positions beyond 256.

YaRN divides by `factor` the frequencies that turn at most beta_slow times within the original length, leaves those
alone that turn at least beta_fast times, and interpolates linearly in i between (both bounds rounded outwards).

Under latent attention only `qk_rope_head_dim` elements of a head turn. The others are pairs of angle 0, so that what
computes attention needs no word for them: a head is laid out as halves of [without position, rotated] (`pair_halves`).
What scales the softmax, m**2, is in the tables as a factor m on queries and keys alike.
Sources: Su et al. 2021, arXiv:2104.09864; Llama's scaling is that of Meta's llama-models, `apply_scaling`; YaRN: Peng
et al. 2023, arXiv:2309.00071, section 3.2, and m as in DeepSeek-V3's published model code.

T tokens, K head width.
"""

import math
from dataclasses import dataclass

import torch

from drumline.recipe.sections import Model, RopeScaling, Yarn


@dataclass(frozen=True)
class Rope:
    """Cosine and sine of every position's angles, fp32 [T, K/2]; under YaRN both times what scales queries and keys."""

    cos_TK2: torch.Tensor
    sin_TK2: torch.Tensor


def tables(model: Model, num_tokens: int, device: torch.device | str) -> Rope:
    """Tables for positions 0 .. num_tokens - 1.

    Args:
        model: gives head_dim, rope_theta, rope_scaling, mla and yarn.
        num_tokens: T, the row's length.
        device: where the tables are made.

    Returns:
        The tables, fp32.
    """
    width = model.head_dim if model.mla is None else model.mla.qk_rope_head_dim
    exponent = torch.arange(0, width, 2, dtype=torch.int64, device=device).float() / width
    frequency = 1.0 / model.rope_theta**exponent
    if model.rope_scaling is not None:
        frequency = _scaled(frequency, model.rope_scaling)
    if model.yarn is not None:
        frequency = _yarn(frequency, model.rope_theta, model.yarn)
    position = torch.arange(num_tokens, dtype=torch.int64, device=device).float()
    angle = torch.outer(position, frequency)
    cos, sin = angle.cos(), angle.sin()
    if model.mla is None:
        return Rope(cos, sin)
    rotated, all_dims = (1.0, 1.0) if model.yarn is None else _magnitudes(model.yarn)
    still = torch.full((num_tokens, model.mla.qk_nope_head_dim // 2), all_dims, dtype=torch.float32, device=device)
    return Rope(
        torch.cat((still, rotated * all_dims * cos), dim=1),
        torch.cat((torch.zeros_like(still), rotated * all_dims * sin), dim=1),
    )


def pair_halves(still: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
    """Joins the parts of a head so that pairs (i, i + K/2) are of one part: what the tables of latent attention expect.

    Args:
        still: [..., S], without position; S is even.
        rotated: [..., R], before rotation, in pairs (i, i + R/2); R is even.

    Returns:
        [..., S + R].
    """
    (a, c), (b, d) = still.chunk(2, dim=-1), rotated.chunk(2, dim=-1)
    return torch.cat((a, b, c, d), dim=-1)


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


def _yarn(frequency: torch.Tensor, theta: float, yarn: Yarn) -> torch.Tensor:
    width = 2 * len(frequency)

    def pair_that_turns(times: float) -> float:
        return width * math.log(yarn.original_max_seq_len / (times * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_that_turns(yarn.beta_fast)), 0)
    last = min(math.ceil(pair_that_turns(yarn.beta_slow)), width - 1)
    pair = torch.arange(len(frequency), dtype=torch.float32, device=frequency.device)
    share_slowed = ((pair - first) / (last - first if last != first else 0.001)).clamp(0, 1)
    return frequency / yarn.factor * share_slowed + frequency * (1 - share_slowed)


def _magnitudes(yarn: Yarn) -> tuple[float, float]:
    """What rotated parts grow by, and what queries and keys grow by in all their dims."""

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(yarn.factor) + 1.0

    return magnitude(yarn.mscale) / magnitude(yarn.mscale_all_dim), magnitude(yarn.mscale_all_dim)
