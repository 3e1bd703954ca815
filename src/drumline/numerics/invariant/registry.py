"""What is known of an operator's bits: a class for every operator that strict mode may meet.

constructive  its bits cannot depend on batch, position, chunking or threads: it moves data, rounds each element once
              as IEEE 754 says, compares, or adds in an order that is fixed by construction
probed        no construction says so, but `drumline bench invariance` looks for a counterexample and finds none
unknown       neither; among them the operators that were seen to move bits

The measurements behind `unknown`: fp32 silu, sigmoid, logaddexp, exp2 and pow round their last elements (numel mod 32)
and strided ones otherwise; bf16 rsqrt and add(alpha=) do; a matmul's bits depend on M, and a sum over rows on how they
are split.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["constructive", "probed", "unknown"]


@dataclass(frozen=True)
class Entry:
    """What is known of one operator.

    Attributes:
        kind: its class.
        why: what makes it so, or what was seen.
        instead: for `unknown`, what works in its place; empty: nothing here does.
    """

    kind: Kind
    why: str
    instead: str = ""


_HERE = "drumline.numerics.invariant"
_MOVES = "moves data"
_ROUNDS = "rounds every element once"
_COMPARES = "compares; order does not matter"
_OWN = "adds in one fixed order"

_CONSTRUCTIVE: Mapping[str, str] = {
    _MOVES: """
        _reshape_alias _to_copy _unsafe_view alias arange as_strided cat clone constant_pad_nd contiguous copy detach
        diagonal embedding empty empty_like empty_strided expand fill flatten flip full full_like gather index
        index_select lift_fresh masked_fill movedim narrow new_empty new_empty_strided new_full new_ones new_zeros ones
        ones_like permute pin_memory repeat reshape resize roll scalar_tensor select select_backward set slice
        slice_backward split split_with_sizes squeeze stack t transpose unbind unfold unsafe_split unsqueeze view
        view_as zero zeros zeros_like tril triu one_hot item promote_types result_type can_cast
        _local_scalar_dense is_same_size
    """,
    _ROUNDS: """
        abs add bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min div floor fmod logical_and
        logical_not logical_or logical_xor maximum minimum mul neg reciprocal relu remainder round rsub sgn sign sqrt
        square sub threshold_backward trunc where
    """,
    _COMPARES: "all amax amin any eq equal ge gt isfinite isinf isnan le lt max min ne sort topk",
}

_OWN_OPERATORS = """
    attention attention_backward cross_entropy_ invariant_attention
    invariant_attention_backward invariant_cross_entropy
    invariant_embedding_backward invariant_matmul invariant_rms_norm invariant_rms_norm_backward invariant_softmax
    invariant_softmax_backward invariant_sum invariant_sum_of_rows invariant_swiglu invariant_swiglu_backward rms_norm
    rms_norm_backward swiglu swiglu_backward
"""

PROBED = ("exp", "log", "log2", "log1p", "expm1", "tanh", "erf", "cos", "sin")
"""Elementwise functions of aten that the probe takes."""

_INSTEAD = {
    "matmul, linear": "addmm addmv baddbmm bmm dot linear matmul mm mv einsum linear_backward addbmm _addmm_activation",
    "softmax, log_softmax": "_softmax _softmax_backward_data softmax",
    "log_softmax": "_log_softmax _log_softmax_backward_data log_softmax logsumexp logaddexp",
    "sum, mean": "sum mean cumsum nansum sum_to_size prod linalg_vector_norm norm var var_mean std",
    "rms_norm": "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward rms_norm rsqrt",
    "swiglu": "silu silu_backward sigmoid sigmoid_backward gelu gelu_backward",
    "exp": "exp2 pow",
    "cross_entropy": "nll_loss_forward nll_loss_backward nll_loss cross_entropy_loss",
    "embedding": "embedding_dense_backward index_add scatter_add index_put scatter_reduce",
    "attention": """
        _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
        _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward scaled_dot_product_attention
    """,
}


def _table() -> dict[str, Entry]:
    table = {}
    for why, names in _CONSTRUCTIVE.items():
        table |= {f"aten::{name}": Entry("constructive", why) for name in names.split()}
    table |= {f"drumline::{name}": Entry("constructive", _OWN) for name in _OWN_OPERATORS.split()}
    table |= {f"aten::{name}": Entry("probed", "the probe found no counterexample") for name in PROBED}
    for own, names in _INSTEAD.items():
        instead = " or ".join(f"{_HERE}.{name.strip()}" for name in own.split(","))
        instead = "torch.exp" if own == "exp" else instead
        unknown = Entry("unknown", "its bits move, or nobody looked", instead)
        table |= {f"aten::{name}": unknown for name in names.split()}
    return table


OPERATORS: Mapping[str, Entry] = _table()

_NOBODY_LOOKED = Entry("unknown", "nobody looked")


def classify(name: str) -> Entry:
    """What is known of an operator.

    Args:
        name: with its namespace, such as `aten::mm`; in-place forms (`aten::add_`) are as the others.

    Returns:
        The entry; `unknown` for a name that is not in the table.
    """
    found = OPERATORS.get(name)
    return found or OPERATORS.get(name.removesuffix("_"), _NOBODY_LOOKED)
