"""What computes attention, and the choice of it.

    out[i] = sum_j softmax_j(q[i] . k[j] / sqrt(K)) v[j]   over starts[i] <= j <= i

An `Attend` takes queries and keys before their rotation, since the CPU kernel rotates inside, and shares each key/value
head among H / G query heads. A choice that needs something built from the document starts (a mask) has a `prepare`,
which the decoder calls once a forward rather than once a layer.
Sources: Vaswani et al. 2017, arXiv:1706.03762; grouped queries: Ainslie et al. 2023, arXiv:2305.13245.

B sequences, T tokens, H query heads, G key/value heads, K head width.
"""

import importlib
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from drumline.models.rope import Rope, rotate
from drumline.recipe.errors import DrumlineError


class Attend(Protocol):
    """Computes causal attention within documents. It may also have `prepare(starts_BT, dtype) -> mask`."""

    def __call__(
        self, q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor, rope: Rope, mask: Any, /
    ) -> torch.Tensor:
        """Attends.

        Args:
            q_BTHK: queries before rotation.
            k_BTGK: keys before rotation; G divides H.
            v_BTGK: values.
            rope: tables for positions 0 .. T - 1.
            mask: None for plain causal; else what `prepare` made, or the document starts where there is no `prepare`.

        Returns:
            out_BTHK, in the dtype of q.
        """
        ...


class SdpaAttend:
    """torch's scaled dot product attention; documents by an additive mask of [B, 1, T, T]."""

    def prepare(self, starts_BT: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The additive mask of causal attention within documents, 0 or -inf, [B, 1, T, T] of `dtype`."""
        position = torch.arange(starts_BT.shape[1], device=starts_BT.device)
        is_seen = (position <= position[:, None]) & (position >= starts_BT[:, :, None])
        mask = torch.zeros(is_seen.shape, dtype=dtype, device=starts_BT.device)
        return mask.masked_fill_(~is_seen, float("-inf"))[:, None]

    def __call__(
        self, q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor, rope: Rope, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """As `Attend`."""
        out_BHTK = F.scaled_dot_product_attention(
            rotate(q_BTHK, rope).transpose(1, 2),
            rotate(k_BTGK, rope).transpose(1, 2),
            v_BTGK.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            enable_gqa=q_BTHK.shape[2] != k_BTGK.shape[2],
        )
        return out_BHTK.transpose(1, 2)


class FlexAttend:
    """torch's FlexAttention, compiled; documents by a block mask that skips what is not seen. CUDA only."""

    def __init__(self):
        from torch.nn.attention.flex_attention import flex_attention

        self._flex_attention = torch.compile(flex_attention, dynamic=False)

    def prepare(self, starts_BT: torch.Tensor, dtype: torch.dtype) -> Any:
        """The BlockMask of causal attention within documents."""
        from torch.nn.attention.flex_attention import create_block_mask

        def is_seen(b, h, i, j):
            return (j <= i) & (j >= starts_BT[b, i])

        num_rows, num_tokens = starts_BT.shape
        return create_block_mask(is_seen, num_rows, None, num_tokens, num_tokens, device=str(starts_BT.device))

    def __call__(
        self, q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor, rope: Rope, mask: Any
    ) -> torch.Tensor:
        """As `Attend`; plain causal attention goes to SDPA, whose flash kernel does that without a block mask."""
        if mask is None:
            return SdpaAttend()(q_BTHK, k_BTGK, v_BTGK, rope, None)
        out_BHTK = self._flex_attention(
            rotate(q_BTHK, rope).transpose(1, 2),
            rotate(k_BTGK, rope).transpose(1, 2),
            v_BTGK.transpose(1, 2),
            block_mask=mask,
            enable_gqa=q_BTHK.shape[2] != k_BTGK.shape[2],
        )
        return out_BHTK.transpose(1, 2)


class KernelAttend:
    """The own CPU kernel: rotation, grouping and documents inside."""

    def __init__(self, attention: Callable[..., torch.Tensor]):
        self._attention = attention

    def __call__(
        self, q_BTHK: torch.Tensor, k_BTGK: torch.Tensor, v_BTGK: torch.Tensor, rope: Rope, mask: torch.Tensor | None
    ) -> torch.Tensor:
        """As `Attend`; the mask is starts_BT itself."""
        return self._attention(q_BTHK, k_BTGK, v_BTGK, rope.cos_TK2, rope.sin_TK2, mask)


def select(kind: str, device: torch.device | str) -> tuple[Attend, str]:
    """Chooses what computes attention.

    Args:
        kind: `auto`, `sdpa`, `flex` or `kernel`, as in the recipe's model.attention.
        device: the device that it will run on.

    Returns:
        The choice, and one line that says which it is and why.

    Raises:
        DrumlineError: the kind does not run on this device.
    """
    device_type = torch.device(device).type
    if kind == "sdpa":
        return SdpaAttend(), "attention: torch SDPA, as asked"
    if kind == "flex":
        if device_type != "cuda":
            raise DrumlineError(
                f"model.attention = 'flex' needs CUDA, but the device is {device_type} (its CPU form has no backward)"
                "\n  try: model.attention=auto"
            )
        return FlexAttend(), "attention: torch FlexAttention, as asked"
    if kind == "kernel":
        attention, missing = _find_kernel(device_type)
        if attention is None:
            raise DrumlineError(f"model.attention = 'kernel' cannot run here: {missing}\n  try: model.attention=auto")
        return KernelAttend(attention), "attention: drumline's CPU kernel, as asked"
    if device_type == "cuda":
        return FlexAttend(), "attention: torch FlexAttention for documents, SDPA without them (device is CUDA)"
    attention, missing = _find_kernel(device_type)
    if attention is None:
        return SdpaAttend(), f"attention: torch SDPA ({missing})"
    return KernelAttend(attention), "attention: drumline's CPU kernel"


def _find_kernel(device_type: str) -> tuple[Callable[..., torch.Tensor] | None, str]:
    """The kernel, or None and why it is missing."""
    if device_type != "cpu":
        return None, f"drumline's kernel runs on the CPU, and the device is {device_type}"
    try:
        kernels = importlib.import_module("drumline.numerics.kernels")
    except ImportError as error:
        return None, f"drumline's CPU kernel is not installed: {error}"
    reason = kernels.reason()
    return (kernels.attention, "") if reason is None else (None, f"drumline's CPU kernel: {reason}")
