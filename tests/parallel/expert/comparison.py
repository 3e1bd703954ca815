"""A decoder with experts in a layout against the same decoder on one device, in fp64: loss and every gradient."""

import functools
from dataclasses import dataclass

import torch
import torch.distributed as dist

from drumline.data import Batch
from drumline.models import build, initialize
from drumline.models.attention import SdpaAttend
from drumline.parallel import build_mesh, held, holder, own_gradients, parallelize
from drumline.parallel.context import context_attend, context_groups
from drumline.parallel.expert import expert_dispatch
from drumline.parallel.place import Held
from drumline.recipe import Layout, Recipe
from drumline.recipe.sections import Model, Moe

ROWS, TOKENS, MICRO = 8, 32, 2
MOE = Moe(num_experts=8, experts_per_token=2, expert_hidden_dim=24, num_dense_layers=1)
KINDS = {
    "aux_loss": MOE.model_copy(update={"balance": "aux_loss", "aux_loss_coefficient": 0.5}),
    "bias": MOE.model_copy(
        update={"balance": "bias", "scoring": "sigmoid", "num_shared_experts": 1, "shared_expert_gate": True}
    ),
    "groups": MOE.model_copy(update={"num_expert_groups": 4, "groups_per_token": 2, "num_shared_experts": 2}),
    "capacity": MOE.model_copy(update={"capacity_factor": 0.75}),
    "few": MOE.model_copy(update={"num_experts": 2, "experts_per_token": 1}),  # fewer on a rank than share them out
    "odd": MOE.model_copy(update={"num_experts": 2, "experts_per_token": 1, "expert_hidden_dim": 25}),
    "first_two": MOE.model_copy(update={"balance": "bias"}),  # all tokens to experts 0 and 1, by the bias
}


@dataclass(frozen=True)
class Case:
    layout: str = "dp1"
    kind: str = "aux_loss"
    zero: int = 3
    checkpointing: str = "none"
    compute: torch.dtype = torch.float64


def model_of(kind: str) -> Model:
    return Model(
        family="qwen3",
        vocab_size=64,
        dim=32,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        hidden_dim=64,
        init_std=0.2,
        moe=KINDS[kind],
    )


def batch(rows: slice = slice(None)) -> Batch:
    tokens = torch.randint(0, 64, (ROWS, TOKENS), generator=torch.Generator().manual_seed(0))
    labels = torch.full_like(tokens, -100)
    labels[:, :-1] = tokens[:, 1:]
    labels[1, 5:] = -100  # ranks have different numbers of labels that count
    return Batch(tokens[rows], labels[rows], torch.zeros_like(tokens, dtype=torch.int32)[rows])


def run(case: Case):
    """This rank's loss, what it holds of every gradient's sum as (offsets, tensor), and the squares that it counts."""
    degrees = Layout.model_validate(case.layout).model_dump()
    tree = {
        "name": "parity",
        "layout": {**degrees, "zero": case.zero},
        "memory": {"activation_checkpointing": case.checkpointing},
        "model": model_of(case.kind).model_dump(),
    }
    recipe = Recipe.model_validate(tree)
    mesh = build_mesh(recipe.layout, torch.device("cpu"), dist.get_rank())
    attend, share = SdpaAttend(), None
    if recipe.layout.cp > 1:
        groups = context_groups(mesh, 1)
        attend, share = context_attend("ring", groups, attend), groups.split.shard_batch
    model = build(
        recipe.model,
        compute_dtype=case.compute,
        attend=attend,
        dispatch=expert_dispatch(mesh),
        num_shares=recipe.layout.cp,
    )
    wide = torch.promote_types(case.compute, torch.float32)
    model.to(wide)
    places = parallelize(model, recipe, mesh, compute_dtype=case.compute, reduce_dtype=wide)
    model.to_empty(device="cpu")
    fill(model, case, holder(places))
    named = dict(model.named_parameters())
    gradients = own_gradients(model, mesh, places)
    degree = recipe.layout.dp * recipe.layout.fsdp
    mine = range(mesh.data_rank * ROWS // degree, (mesh.data_rank + 1) * ROWS // degree)
    total = torch.zeros((), dtype=torch.float64)
    gradients.zero_grad()
    starts = [row for row in mine if row % MICRO == 0 or degree > ROWS // MICRO]
    for row in starts:
        rows = slice(row, row + min(MICRO, len(mine)))
        part = batch(rows)
        part = part if share is None else share(part)
        gradients.set_sync(row == starts[-1])
        loss = model(part.tokens_BT, starts_BT=part.starts_BT, labels_BT=part.labels_BT)
        (loss / 200).backward()
        total += loss.detach().double()
    gradients.finish()
    found = {}
    for name, param in named.items():
        assert param.grad is not None, f"{name} has no gradient"
        part = held(param.grad, places[name])
        found[name] = part.offsets, part.tensor
    squares = torch.zeros((), dtype=torch.float64)
    for grad in gradients.counted():
        squares += grad.double().square().sum()
    return total, found, squares


def fill(model, case: Case, part_of) -> None:
    """Weights by name and place, the same in every layout; buffers that say something."""
    made = {name: _in_fp32(part_of(name, param)) for name, param in model.named_parameters()}
    initialize(model, 3, lambda name, _: made[name])
    with torch.no_grad():
        for name, param in model.named_parameters():
            part_of(name, param).tensor.copy_(made[name].tensor)
        for index, (name, buffer) in enumerate(model.named_buffers()):
            values = torch.linspace(0.1, 0.4, len(buffer), dtype=torch.float64).roll(index)
            if case.kind == "first_two":
                values = torch.tensor([100.0, 100.0, *[0.0] * 6])
            buffer.copy_(values if name.endswith("bias") else values * 2 / values.sum())


def _in_fp32(part) -> Held:
    return Held(torch.empty_like(part.tensor, dtype=torch.float32), part.offsets, part.shape)


@functools.cache
def on_one_device(kind: str, compute: torch.dtype = torch.float64):
    """The definition: the whole batch through the model with the dispatcher of one device."""
    model = build(model_of(kind), compute_dtype=compute, device="cpu").to(torch.promote_types(compute, torch.float32))

    fill(model, Case(kind=kind), lambda _, p: Held(p.detach(), (0,) * p.ndim, tuple(p.shape)))
    whole = batch()
    loss = model(whole.tokens_BT, starts_BT=whole.starts_BT, labels_BT=whole.labels_BT)
    (loss / 200).backward()
    grads = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach().double(), grads


def error(case: Case) -> dict[str, float]:
    """By name, how far a gradient is from one device's in fp64, over its norm; the loss and the squared norm, too. The
    same on every rank.
    """
    loss, parts, square = run(case)
    whole_loss, whole = on_one_device(case.kind)
    assert parts.keys() == whole.keys()
    far, of_one = [], []
    for name, (offsets, tensor) in parts.items():
        expected = whole[name][tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))]
        far.append((tensor.double() - expected).norm())
        of_one.append(whole[name].norm().clamp(min=1e-6))  # an expert that nobody chose has none
    sums, worst = torch.stack([loss, square]), torch.stack(far) / torch.stack(of_one)
    dist.all_reduce(sums)
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    norm = sum(grad.square().sum() for grad in whole.values())
    found = {"loss": float((sums[0] - whole_loss).abs() / whole_loss), "norm": float((sums[1] - norm).abs() / norm)}
    return {**found, **dict(zip(parts, worst.tolist(), strict=True))}


def errors_of_one_device(case: Case) -> dict[str, float]:
    """The same for gradients of one device in the case's dtype."""
    whole, rounded = on_one_device(case.kind)[1], on_one_device(case.kind, case.compute)[1]
    return {name: float((rounded[name] - grad).norm() / grad.norm().clamp(min=1e-6)) for name, grad in whole.items()}
