"""Multi-head latent attention: keys and values of all heads come from one narrow latent, so that a cache keeps little.

    c = norm(W_kva x)[:R],   r = W_kva x[R:]              the latent, and one rotary key that all heads share
    k_h = [W_kb c ; r],   v_h = W_kb c,   q_h = W_qb norm(W_qa x)      each rotated in its part of qk_rope_head_dim
    out = W_o [softmax(q_h . k_h / sqrt(K)) v_h]          K = qk_nope_head_dim + qk_rope_head_dim

The sum is `attend`'s as for any attention: a head is laid out so that pairs of angle 0 stay as they are
(`drumline.models.rope`), and values, which are narrower than keys, are filled up with zeros that are cut off again.
What is made for each head (q_proj or q_b_proj, kv_b_proj, o_proj) is apart from what all heads share (q_a_proj,
kv_a_proj, the norms, the rotary key).
Sources: DeepSeek-V2, arXiv:2405.04434, section 2.1; DeepSeek-V3, arXiv:2412.19437, section 2.1.1.

B sequences, T tokens, D model width, H heads, K width of a query or key head, R width of the latent.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from drumline.models.attention import Attend
from drumline.models.layers import Linear, project
from drumline.models.norm import RMSNorm
from drumline.models.rope import Rope, pair_halves
from drumline.recipe.sections import Model


class LatentAttention(nn.Module):
    """Multi-head latent attention; the sum itself is `attend`'s."""

    def __init__(self, model: Model, attend: Attend, device: torch.device | str = "meta"):
        super().__init__()
        mla, eps = model.mla, model.norm_eps
        if mla is None:
            raise ValueError("latent attention needs model.mla")
        self.mla = mla
        self.attend = attend
        self.project = project
        key_width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
        self.q_proj: Linear | None = None
        self.q_a_proj: Linear | None = None
        self.q_a_norm: RMSNorm | None = None
        self.q_b_proj: Linear | None = None
        if mla.q_lora_rank:
            self.q_a_proj = Linear(model.dim, mla.q_lora_rank, device)
            self.q_a_norm = RMSNorm(mla.q_lora_rank, eps, device)
            self.q_b_proj = Linear(mla.q_lora_rank, model.num_heads * key_width, device)
        else:
            self.q_proj = Linear(model.dim, model.num_heads * key_width, device)
        self.kv_a_proj = Linear(model.dim, mla.kv_lora_rank + mla.qk_rope_head_dim, device)
        self.kv_a_norm = RMSNorm(mla.kv_lora_rank, eps, device)
        self.kv_b_proj = Linear(mla.kv_lora_rank, model.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), device)
        self.o_proj = Linear(model.num_heads * mla.v_head_dim, model.dim, device)

    def forward(self, x_BTD: torch.Tensor, rope: Rope, mask: Any) -> torch.Tensor:
        mla = self.mla
        parts = (mla.qk_nope_head_dim, mla.qk_rope_head_dim)
        # The number of heads is left to unflatten: a tensor-parallel rank holds some of them.
        first = self.q_proj if self.q_a_proj is None else self.q_a_proj
        assert first is not None
        queries, compressed = self.project(x_BTD, (first, self.kv_a_proj))
        if self.q_b_proj is not None and self.q_a_norm is not None:
            queries = self.q_b_proj(self.q_a_norm(queries))
        q_BTHK = queries.unflatten(-1, (-1, sum(parts)))
        latent_BTR, shared = compressed.split((mla.kv_lora_rank, mla.qk_rope_head_dim), dim=-1)
        kv = self.kv_b_proj(self.kv_a_norm(latent_BTR)).unflatten(-1, (-1, mla.qk_nope_head_dim + mla.v_head_dim))
        key, value = kv.split((mla.qk_nope_head_dim, mla.v_head_dim), dim=-1)
        rotary = shared.unsqueeze(2).expand(-1, -1, kv.shape[2], -1)
        out = self.attend(
            pair_halves(*q_BTHK.split(parts, dim=-1)),
            pair_halves(key, rotary),
            F.pad(value, (0, sum(parts) - mla.v_head_dim)),
            rope,
            mask,
        )
        return self.o_proj(out[..., : mla.v_head_dim].flatten(-2))
