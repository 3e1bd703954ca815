"""A small decoder that computes in fixed pieces, on one rank or on those of a layout, with the same weights."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

from drumline import models
from drumline.models import Decoder
from drumline.models.moe import Router
from drumline.parallel import Places, held
from drumline.parallel.context import context_groups
from drumline.parallel.exact import compute_in_pieces, exact_attend
from drumline.parallel.mesh import Mesh
from drumline.parallel.plan import cut_parameters
from drumline.recipe import Recipe, load

ROWS, TOKENS, VOCABULARY = 3, 80, 97
SHAPE = (
    "model.num_layers=2",
    "model.dim=48",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.head_dim=12",
    "model.hidden_dim=88",
    f"model.vocab_size={VOCABULARY}",
    "model.init_std=0.2",
    "model.family=qwen3",
    "model.qk_norm=true",
    f"data.seq_len={TOKENS}",
    "numerics.blocks=4",
)


EXPERTS = (
    "model.num_layers=2",
    "model.moe.num_experts=8",
    "model.moe.expert_hidden_dim=24",
    "model.moe.num_dense_layers=1",
    "model.moe.num_shared_experts=1",
    "model.moe.shared_expert_gate=true",
    "model.moe.balance=aux_loss",
    "model.moe.aux_loss_coefficient=0.5",
)
SIGMOID = (*EXPERTS, "model.moe.scoring=sigmoid", "model.moe.balance=bias")


@dataclass(frozen=True)
class Spread:
    """A decoder, and where its parameters and tokens lie."""

    model: Decoder
    places: Places
    share: object


def recipe(*overrides: str) -> Recipe:
    """The recipe of the decoder."""
    return load("llama3-debug", [*SHAPE, *overrides])


def weights(shape: Recipe) -> dict[str, torch.Tensor]:
    """Every logical weight, fp64."""
    model = models.build(shape.model)
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(param.shape, generator=generator, dtype=torch.float64) * (0.2 if param.ndim > 1 else 1.0)
        for name, param in model.named_parameters()
    }


def tokens(with_documents: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Tokens, labels of which a third do not count, and starts of documents of 27 tokens."""
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(0, VOCABULARY, (ROWS, TOKENS), generator=generator)
    labels_BT = tokens_BT.roll(-1, 1)
    labels_BT[torch.rand(ROWS, TOKENS, generator=generator) < 0.3] = -100
    starts_BT = (torch.arange(TOKENS).expand(ROWS, -1) // 27 * 27).to(torch.int32)
    return tokens_BT, labels_BT, starts_BT if with_documents else None


def decoder(wanted: Recipe, mesh: Mesh, compute_dtype: torch.dtype, values: Mapping[str, torch.Tensor]) -> Spread:
    """The decoder of a rank of a mesh."""
    groups = context_groups(mesh, wanted.layout.ulysses_degree) if wanted.layout.cp > 1 else None
    model = models.build(
        wanted.model, compute_dtype=compute_dtype, attend=exact_attend(wanted, groups), num_shares=wanted.layout.cp
    )
    if compute_dtype == torch.float64:
        model.double()
    blocks = wanted.numerics.blocks
    places = cut_parameters(model, mesh, shares_tokens=wanted.layout.sequence_parallel, blocks=blocks)
    compute_in_pieces(model, mesh, wanted)
    model.to_empty(device="cpu")
    fill_balance(model)
    with torch.no_grad():
        for name, param in model.named_parameters():
            part = held(param, places[name])
            param.zero_()
            part.tensor.copy_(own(values[name], part))
    return Spread(model, places, groups.split.shard if groups is not None else lambda x: x)


def fill_balance(model: Decoder) -> None:
    """Gives routers an uneven load, or bias."""
    for module in model.modules():
        if isinstance(module, Router) and module.load is not None:
            module.load.copy_(torch.linspace(0.5, 1.5, len(module.load)) * 2 / len(module.load))
        if isinstance(module, Router) and module.bias is not None:
            module.bias.copy_(torch.linspace(-0.1, 0.1, len(module.bias)))


def own(whole: torch.Tensor, part) -> torch.Tensor:
    """What a rank holds of a logical tensor."""
    for dim, (offset, size) in enumerate(zip(part.offsets, part.tensor.shape, strict=True)):
        whole = whole.narrow(dim, offset, size)
    return whole


def loss_and_gradients(
    wanted: Recipe, mesh: Mesh, compute_dtype: torch.dtype, with_documents: bool = True
) -> tuple[torch.Tensor, dict[str, object]]:
    """The summed loss, and by name what this rank holds of each gradient."""
    spread = decoder(wanted, mesh, compute_dtype, weights(wanted))
    batch = [x if x is None else spread.share(x) for x in tokens(with_documents)]
    loss = spread.model(batch[0], labels_BT=batch[1], starts_BT=batch[2])
    loss.backward()
    grads = {name: held(param.grad, spread.places[name]) for name, param in spread.model.named_parameters()}
    return loss.detach(), grads


def alone() -> Mesh:
    """The mesh of one rank."""
    return Mesh(recipe().layout, None, 0)


def mesh_of(wanted: Recipe) -> Mesh:
    """The mesh of a layout of as many ranks as there are."""
    return Mesh(wanted.layout, None, dist.get_rank())
