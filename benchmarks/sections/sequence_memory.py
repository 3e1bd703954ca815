"""What a block keeps for its backward on each rank: alone, with tensor parallelism, and with sequence parallelism.

Kept bytes are those of distinct storages that autograd saves in the block's forward, without weights and without the
rotary tables, which all blocks share. The formula counts numbers a token of this block, t ranks, with s = t where
tokens are shared out and s = 1 where they are not:

    (4 D + 2) / s         two norms: each input, one number a row, and what enters the matmuls
    2 (H + G) K / t       queries, keys, values; and what attention gives
    H / t                 its log-sum-exp
    3 F / t               gate, up, their product

Of all this sequence parallelism leaves nothing whole. Whole stay, once a model and not once a block: the rotary tables,
and what the loss keeps of the last hidden states, which it gathers (they, and their gradient, which autograd does not
see).
Source: Korthikanti et al. 2022, arXiv:2205.05198, table 2, sbh (10 + 24 / t) and sbh 34 / t for a block of GPT in 16
bit with dropout and without the scores of attention, which are recomputed here, too.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from harness import Bar

from drumline import models
from drumline.models.rope import tables
from drumline.parallel import build_mesh, holder
from drumline.recipe import load
from drumline.recipe.sections import Model
from drumline.train.assemble import Assembled, assemble
from sections.section import Section, on_ranks

RANKS, NUM_BYTES = 4, 4  # of fp32
TOKENS = {False: 1024, True: 256}
LAYOUTS = [(1, False), (2, False), (2, True), (4, False), (4, True)]
SHARE_OF_DEGREE, AGREEMENT = 0.95, 0.98
MODEL = [
    "model.dim=256",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.head_dim=32",
    "model.hidden_dim=704",
    "model.num_layers=2",
    "model.vocab_size=1024",
    "model.attention=sdpa",
    "precision.compute=fp32",
]


def measure(quick: bool) -> Section:
    """Measures; `quick` takes a shorter sequence."""
    rows = on_ranks(RANKS, run, TOKENS[quick])
    block = {(row["tp"], row["sp"]): row["block"] for row in rows}
    bars = []
    for tp in (2, 4):
        fall = block[1, False] / block[tp, True]
        bars.append(Bar(f"tp{tp} with sequence parallelism: fall of a block's bytes", fall, SHARE_OF_DEGREE * tp))
    worst = max(abs(row["block"] / row["formula"] - 1) for row in rows)
    bars.append(Bar("1 - largest relative error of the formula", 1 - worst, AGREEMENT))
    lines = [f"(c) bytes kept for the backward a rank, {TOKENS[quick]:,} tokens, fp32"]
    lines.append("  tp  tokens shared      block     formula   fall   whole model   fall")
    whole = rows[0]["model"]
    for row in rows:
        lines.append(
            f"  {row['tp']}   {'yes' if row['sp'] else 'no ':13} {row['block']:11,} {row['formula']:11,.0f}   "
            f"{block[1, False] / row['block']:4.2f}   {row['model']:11,}   {whole / row['model']:4.2f}"
        )
    return Section(bars, {"rows": rows}, "\n".join(lines))


def run(num_tokens: int) -> list[dict[str, float]]:
    """The figures of each layout; the largest of any rank."""
    rows = []
    for tp, sp in LAYOUTS:
        layout = [f"layout.tp={tp}", f"layout.dp={RANKS // tp}", f"layout.sequence_parallel={str(sp).lower()}"]
        recipe, cpu = load("llama3-debug", [*MODEL, *layout, f"data.seq_len={num_tokens}"]), torch.device("cpu")
        made = assemble(recipe, build_mesh(recipe.layout, cpu, dist.get_rank()), cpu)
        models.initialize(made.model, 0, holder(made.places))
        rows.append(
            {
                "tp": tp,
                "sp": sp,
                "block": _largest(_of_block(made, recipe.model, num_tokens, tp if sp else 1)),
                "formula": _formula(recipe.model, num_tokens, tp, tp if sp else 1),
                "model": _largest(_of_model(made, recipe.model, num_tokens)),
            }
        )
    return rows


def _formula(model: Model, num_tokens: int, tp: int, shares: int) -> float:
    between = 4 * model.dim + 2
    heads = 2 * (model.num_heads + model.num_kv_heads) * model.head_dim + model.num_heads
    return NUM_BYTES * num_tokens * (between / shares + (heads + 3 * model.hidden_dim) / tp)


def _of_block(made: Assembled, model: Model, num_tokens: int, shares: int) -> int:
    rope, block = tables(model, num_tokens, torch.device("cpu")), next(iter(made.model.layers))
    x_BTD = torch.ones(1, num_tokens // shares, model.dim, requires_grad=True)
    return kept_bytes(lambda: block(x_BTD, rope), apart_from=[*block.parameters(), rope.cos_TK2, rope.sin_TK2])


def _of_model(made: Assembled, model: Model, num_tokens: int) -> int:
    tokens_BT = torch.arange(num_tokens).remainder(model.vocab_size)[None]
    return kept_bytes(lambda: made.model(tokens_BT, labels_BT=tokens_BT), apart_from=list(made.model.parameters()))


def kept_bytes(forward: Callable[[], object], apart_from: list[torch.Tensor]) -> int:
    """Bytes of the storages that autograd keeps of a forward, each counted once.

    Args:
        forward: runs it.
        apart_from: tensors whose storages do not count.
    """
    found: dict[int, torch.UntypedStorage] = {}  # held, so that no address is taken twice

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        result = forward()
    for tensor in apart_from:
        found.pop(tensor.untyped_storage().data_ptr(), None)
    del result
    return sum(storage.nbytes() for storage in found.values())


def _largest(num_bytes: int) -> int:
    every = torch.tensor(num_bytes)
    dist.all_reduce(every, dist.ReduceOp.MAX)
    return int(every)
