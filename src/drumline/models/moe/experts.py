"""All experts of a layer as one stack of SwiGLU weights, each applied to its own run of rows.

    y[r] = W_e x[r]      e: the expert whose run row r lies in

Source: Gale et al. 2022, arXiv:2211.15841 (dropless experts as one grouped product).

R rows sorted by expert, E experts, D model width, F hidden width of an expert.
"""

import torch
import torch.nn.functional as F
from torch import nn

from drumline.models.layers import swiglu

_GROUPED = frozenset((torch.float32, torch.bfloat16, torch.float16))
_STRIDE_BYTES = 16  # what torch's grouped product asks of a row


class StackedLinear(nn.Module):
    """y = x W_e^T without bias; W is [E, out, in]. Filled by `drumline.models.initialize`."""

    def __init__(self, num_experts: int, in_features: int, out_features: int, device: torch.device | str = "meta"):
        super().__init__()
        shape = (num_experts, out_features, in_features)
        self.weight = nn.Parameter(torch.empty(shape, dtype=torch.float32, device=device))

    def forward(self, x_RD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        return grouped_linear(x_RD, self.weight, counts_E)


class Experts(nn.Module):
    """SwiGLU of every expert on its rows."""

    def __init__(self, num_experts: int, dim: int, hidden_dim: int, device: torch.device | str = "meta"):
        super().__init__()
        self.gate_proj = StackedLinear(num_experts, dim, hidden_dim, device)
        self.up_proj = StackedLinear(num_experts, dim, hidden_dim, device)
        self.down_proj = StackedLinear(num_experts, hidden_dim, dim, device)

    def forward(self, x_RD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
        hidden_RF = swiglu(self.gate_proj(x_RD, counts_E), self.up_proj(x_RD, counts_E))
        return self.down_proj(hidden_RF, counts_E)


def grouped_linear(x_RD: torch.Tensor, weight_EFD: torch.Tensor, counts_E: torch.Tensor) -> torch.Tensor:
    """Multiplies each expert's rows by its weight.

    Args:
        x_RD: rows sorted by expert.
        weight_EFD: cast to the dtype of the rows.
        counts_E: int64 rows of each expert, which may be 0; rows beyond their sum belong to none.

    Returns:
        y_RF; rows of no expert hold anything, and get any gradient.
    """
    weight_EFD = weight_EFD.to(x_RD.dtype)
    aligned = all(size * x_RD.element_size() % _STRIDE_BYTES == 0 for size in weight_EFD.shape[1:])
    if x_RD.dtype in _GROUPED and aligned and len(x_RD):  # torch 2.13 has no backward of its product of no rows
        ends_E = counts_E.cumsum(0).to(torch.int32)
        return F.grouped_mm(x_RD, weight_EFD.transpose(-2, -1), offs=ends_E)
    counts = counts_E.tolist()
    parts = x_RD.split([*counts, len(x_RD) - sum(counts)])
    products = [F.linear(part, weight) for part, weight in zip(parts, weight_EFD, strict=False)]
    return torch.cat([*products, x_RD.new_zeros(len(parts[-1]), weight_EFD.shape[1])])
