"""Attention over some of the keys, and how such partial results join.

    out_p = softmax(s_p) v_p,   lse_p = log sum exp s_p,   s_p = scaled scores against the keys of part p
    out = sum_p exp(lse_p - lse) out_p,   lse = log sum_p exp lse_p

The backward of a part takes the out and logsumexp over *all* keys: its probabilities are then exp(s_p - lse), and the
gradients of q add up over the parts. A row that sees nothing of a part has out 0 and logsumexp -inf there.
Sources: Dao et al. 2022, arXiv:2205.14135, section 3.1; Liu et al. 2023, arXiv:2310.01889 (Ring Attention).

B sequences, I rows, J columns, H query heads, G key/value heads, K head width.
"""

import math

import torch

_aten = torch.ops.aten
_MAX_SCORES = 2**26  # of the plain path at a time: 256 MiB in fp32

Mask = torch.Tensor | None
"""bool [B, I, J]: which columns each row sees; None: all."""


def attend_part(
    q_BHIK: torch.Tensor, k_BGJK: torch.Tensor, v_BGJK: torch.Tensor, mask: Mask, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends to some keys.

    Args:
        q_BHIK: rotated queries.
        k_BGJK: rotated keys; G divides H.
        v_BGJK: values.
        mask: what each row sees.
        is_causal: I equals J, and row i sees columns 0 .. i of what the mask leaves.

    Returns:
        out_BHIK in q's dtype and lse_BHI in fp32 at least.
    """
    if _runs_flash_cpu(q_BHIK):
        bias = None if mask is None else _bias(mask, q_BHIK.dtype)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHIK, k_BGJK, v_BGJK, 0.0, is_causal, attn_mask=bias
        )
        if mask is not None:
            # The kernel reports 0 as the logsumexp of a row that sees nothing.
            lse = lse.masked_fill(~_sees_any(mask, is_causal)[:, None], -math.inf)
        return out, lse
    if _runs_flash_cuda(q_BHIK, mask):
        out, lse, *_ = _aten._scaled_dot_product_flash_attention(q_BHIK, k_BGJK, v_BGJK, 0.0, is_causal)
        return out, lse
    return _plain(q_BHIK, k_BGJK, v_BGJK, mask, is_causal)


def attend_part_backward(
    grad_out_BHIK: torch.Tensor,
    q_BHIK: torch.Tensor,
    k_BGJK: torch.Tensor,
    v_BGJK: torch.Tensor,
    out_BHIK: torch.Tensor,
    lse_BHI: torch.Tensor,
    mask: Mask,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The share of some keys in the gradients.

    Args:
        grad_out_BHIK: gradient of the result over all keys.
        q_BHIK: as in the forward.
        k_BGJK: likewise.
        v_BGJK: likewise.
        out_BHIK: the result over all keys.
        lse_BHI: the logsumexp over all keys; finite.
        mask: as in the forward.
        is_causal: likewise.

    Returns:
        Gradients of q, to be added over parts, and of these keys and values.
    """
    lse_BHI = lse_BHI.contiguous()
    if _runs_flash_cpu(q_BHIK):
        bias = None if mask is None else _bias(mask, q_BHIK.dtype)
        return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_out_BHIK, q_BHIK, k_BGJK, v_BGJK, out_BHIK, lse_BHI, 0.0, is_causal, attn_mask=bias
        )
    if _runs_flash_cuda(q_BHIK, mask):
        no_randomness = torch.zeros((), dtype=torch.int64, device=q_BHIK.device)
        return _aten._scaled_dot_product_flash_attention_backward(
            *(grad_out_BHIK, q_BHIK, k_BGJK, v_BGJK, out_BHIK, lse_BHI, None, None),
            *(q_BHIK.shape[2], k_BGJK.shape[2], 0.0, is_causal, no_randomness, no_randomness),
        )
    return _plain_backward(grad_out_BHIK, q_BHIK, k_BGJK, v_BGJK, out_BHIK, lse_BHI, mask, is_causal)


def merge_(
    out_BHIK: torch.Tensor, lse_BHI: torch.Tensor, part_out_BHIK: torch.Tensor, part_lse_BHI: torch.Tensor
) -> None:
    """Joins a part to what earlier parts gave, in place and in the dtype of the accumulators.

    Args:
        out_BHIK: so far; 0 where nothing was seen.
        lse_BHI: so far; -inf where nothing was seen.
        part_out_BHIK: of the new part.
        part_lse_BHI: likewise.
    """
    # exp(part - logaddexp(so far, part)) as a sigmoid, which cannot overflow. Where neither saw anything the
    # difference is nan; any other nan comes from the inputs and must stay.
    share_BHI = torch.sigmoid(part_lse_BHI - lse_BHI).masked_fill_(part_lse_BHI == -math.inf, 0.0)
    out_BHIK.lerp_(part_out_BHIK.to(out_BHIK.dtype), share_BHI[..., None].to(out_BHIK.dtype))
    torch.logaddexp(lse_BHI, part_lse_BHI.to(lse_BHI.dtype), out=lse_BHI)


def _runs_flash_cpu(q: torch.Tensor) -> bool:
    # In fp64 this kernel takes exponentials in fp32: error 2e-7.
    return q.device.type == "cpu" and q.dtype in (torch.float32, torch.bfloat16, torch.float16)


def _runs_flash_cuda(q: torch.Tensor, mask: Mask) -> bool:
    is_narrow = q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return q.device.type == "cuda" and mask is None and is_narrow


def _bias(mask_BIJ: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    bias = torch.zeros(mask_BIJ.shape, dtype=dtype, device=mask_BIJ.device)
    return bias.masked_fill_(~mask_BIJ, -math.inf)[:, None]


def _sees_any(mask_BIJ: torch.Tensor, is_causal: bool) -> torch.Tensor:
    return (mask_BIJ.tril() if is_causal else mask_BIJ).any(-1)


def _plain(q, k, v, mask, is_causal):
    """The definition, some rows at a time so that scores of a whole tile need not exist."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=dtype, device=q.device)
    keys, values = _grouped(k, dtype), _grouped(v, dtype)
    for rows in _slabs(q, k):
        scores = _scores(q[:, :, rows], keys, mask, is_causal, rows)
        part_lse = scores.logsumexp(-1)
        seeing = part_lse.masked_fill(part_lse == -math.inf, 0.0)  # exp(-inf - 0) is the 0 of a row that sees nothing
        probabilities = (scores - seeing[..., None]).exp_()
        out[:, :, rows] = (probabilities @ values).flatten(1, 2).to(q.dtype)
        lse[:, :, rows] = part_lse.flatten(1, 2)
    return out, lse


def _plain_backward(grad_out, q, k, v, out, lse, mask, is_causal):
    dtype = torch.promote_types(q.dtype, torch.float32)
    keys, values = _grouped(k, dtype), _grouped(v, dtype)
    scale, heads = 1.0 / math.sqrt(q.shape[-1]), (k.shape[1], -1)
    grad_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    grad_k, grad_v = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (k, v))
    for rows in _slabs(q, k):
        probabilities = (
            _scores(q[:, :, rows], keys, mask, is_causal, rows) - lse[:, :, rows].unflatten(1, heads)[..., None]
        ).exp_()
        grad, result, queries = (x[:, :, rows].to(dtype).unflatten(1, heads) for x in (grad_out, out, q))
        grad_v += (probabilities.mT @ grad).sum(2)
        grad_scores = probabilities * (grad @ values.mT - (grad * result).sum(-1, keepdim=True))
        grad_q[:, :, rows] = (grad_scores @ keys).mul_(scale).flatten(1, 2).to(q.dtype)
        grad_k += (grad_scores.mT @ queries).sum(2).mul_(scale)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _scores(q_BHIK, keys_BG1JK, mask, is_causal, rows):
    """Scaled scores, grouped by key/value head; -inf where a row does not look."""
    queries = q_BHIK.to(keys_BG1JK.dtype).unflatten(1, (keys_BG1JK.shape[1], -1))
    # Not in place: selective checkpointing keeps a product as it is, to be used again where this runs again.
    scores = (queries @ keys_BG1JK.mT) * (1.0 / math.sqrt(q_BHIK.shape[-1]))
    if mask is not None:
        scores.masked_fill_(~mask[:, None, None, rows], -math.inf)
    if is_causal:
        i, j = (torch.arange(n, device=scores.device) for n in (rows.stop, scores.shape[-1]))
        scores.masked_fill_(j > i[rows, None], -math.inf)
    return scores


def _grouped(x_BGJK: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x_BGJK.to(dtype)[:, :, None]


def _slabs(q: torch.Tensor, k: torch.Tensor) -> list[slice]:
    num_rows = q.shape[2]
    step = max(1, _MAX_SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    return [slice(start, min(num_rows, start + step)) for start in range(0, num_rows, step)]
