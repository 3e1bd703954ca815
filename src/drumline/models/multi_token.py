"""Multi-token prediction: small modules behind the model that predict tokens further ahead, one token a module.

    h'_i^k = M_k [norm(embedding(t_{i+k})) ; norm(h_i^{k-1})],   h^k = norm(block_k(h'^k))       k = 1 .. depth
    loss   = weight / depth * sum_k mean_i -log p(t_{i+k+1} | h_i^k)

h^0 is what the model's own output is computed from, after its last norm. The embedding and the output projection are
the model's own. Position i looks back as in the model: what token t_{i+k} of another document does to a position counts
in no loss, and no later position of this document sees it.
Sources: DeepSeek-V3, arXiv:2412.19437, section 2.2, equations 21 to 25; that the embedding comes first in M_k, and
where the norms are, is from the published weights, as `transformers` reads them.

B sequences, T tokens, D model width.
"""

from typing import Any

import torch
from torch import nn

from drumline.models.layers import Linear
from drumline.models.moe import Routed
from drumline.models.norm import RMSNorm
from drumline.models.rope import Rope
from drumline.recipe.sections import Model


class MultiToken(nn.Module):
    """One module. Where its block has experts, the result is a pair: hidden states, and what the router did."""

    def __init__(self, model: Model, block: nn.Module, device: torch.device | str = "meta"):
        super().__init__()
        self.embedding_norm = RMSNorm(model.dim, model.norm_eps, device)
        self.hidden_norm = RMSNorm(model.dim, model.norm_eps, device)
        self.merge_proj = Linear(2 * model.dim, model.dim, device)
        self.block = block
        self.norm = RMSNorm(model.dim, model.norm_eps, device)

    def forward(
        self,
        hidden_BTD: torch.Tensor,
        embedded_BTD: torch.Tensor,
        rope: Rope,
        mask: Any = None,
        places_BT: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, Routed]:
        both = torch.cat((self.embedding_norm(embedded_BTD), self.hidden_norm(hidden_BTD)), dim=-1)
        found = self.block(self.merge_proj(both), rope, mask, places_BT)
        return self.norm(found) if isinstance(found, torch.Tensor) else (self.norm(found[0]), found[1])
