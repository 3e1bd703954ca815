"""A whole decoder spread by tensor parallelism against fp64 on one device: loss, norm, and every parameter's gradient.

Each is judged as a ratio, error(ranks, fp64) / error(one device, fp64): 1 where spreading adds no error of its own.
"""

from functools import cache

import torch
import torch.distributed as dist

from drumline import models
from drumline.comm import Place, World
from drumline.data import Batch
from drumline.data.batch import Ahead
from drumline.models.attention import SdpaAttend
from drumline.parallel import build_mesh, held, holder
from drumline.recipe import load
from drumline.train.assemble import assemble
from drumline.train.scalars import make_reduce_scalars
from drumline.train.step import count_valid

LIMIT = 8.0
SCALAR_FLOOR = 5e-7  # one number may be nearly exact by chance
ROWS, TOKENS = 4, 48
DENSE = (
    "model.num_layers=2",
    "model.dim=32",
    "model.num_heads=8",
    "model.num_kv_heads=4",
    "model.head_dim=8",
    "model.hidden_dim=48",
    "model.vocab_size=33",
    "model.init_std=0.2",
    "model.attention=sdpa",
    f"data.seq_len={TOKENS}",
    "memory.loss_chunk_tokens=40",
)
NORMED = ("model.family=qwen3", "model.qk_norm=true")
TIED = ("model.tie_embeddings=true", "model.vocab_size=2049")
EXPERTS = (
    *NORMED,
    "model.num_layers=3",
    "model.moe.num_experts=8",
    "model.moe.expert_hidden_dim=24",
    "model.moe.num_dense_layers=1",
    "model.moe.num_shared_experts=1",
    "model.moe.shared_expert_gate=true",
    "model.moe.balance=aux_loss",
    "model.moe.aux_loss_coefficient=0.5",
)
LATENT = (
    "model.family=deepseek_v3",
    "model.num_heads=4",
    "model.head_dim=24",
    "model.mla.q_lora_rank=48",
    "model.mla.kv_lora_rank=32",
    "model.mla.qk_nope_head_dim=16",
    "model.mla.qk_rope_head_dim=8",
    "model.mla.v_head_dim=16",
    "model.num_mtp_layers=2",
)
LATENT_EXPERTS = (*EXPERTS[2:], *LATENT)
APART = ("layout.sequence_parallel=false",)
ASYNC = ("layout.tp_async=true",)


def recipe(*overrides):
    return load("llama3-debug", [*DENSE, *overrides])


def batch(vocab_size, num_ahead=0):
    """Documents of uneven length, a third of the labels not counted, most of them in the later half."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (ROWS, TOKENS), generator=generator)
    tokens[0, :2] = torch.tensor([0, vocab_size - 1])
    labels = tokens.roll(-1, 1)
    chance = torch.rand(ROWS, TOKENS, generator=generator)
    labels[chance < torch.linspace(0.0, 0.7, TOKENS)] = -100
    starts = torch.arange(TOKENS).expand(ROWS, -1) // 19 * 19
    ahead = tuple(Ahead(tokens.roll(-k, 1), labels.roll(-k, 1)) for k in range(1, num_ahead + 1))
    return Batch(tokens, labels, starts.int().contiguous(), ahead)


def set_load(model):
    """What the balancing loss weighs by; at a run's first step it is 0, and the loss with it."""
    for name, buffer in model.named_buffers():
        if name.endswith("router.load"):
            buffer.copy_(torch.linspace(0.2, 2.0, len(buffer)) * 2 / 8.8)


@cache
def on_one_device(overrides, dtype):
    """Loss a valid token, gradient norm and gradients by name."""
    section = recipe(*overrides).model
    model = models.build(section, compute_dtype=dtype, attend=SdpaAttend(), device="cpu")
    models.initialize(model, seed=0)
    set_load(model)
    model = model.to(dtype)
    part = batch(section.vocab_size, section.num_mtp_layers)
    ahead = {"ahead": part.ahead} if part.ahead else {}
    loss = model(part.tokens_BT, starts_BT=part.starts_BT, labels_BT=part.labels_BT, **ahead) / part.num_tokens
    loss.backward()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    norm = torch.stack([grad.double().square().sum() for grad in gradients.values()]).sum().sqrt()
    return {"loss": loss.detach(), "norm": norm, **gradients}


def assembled(*overrides):
    resolved, device = recipe(*overrides), torch.device("cpu")
    made = assemble(resolved, build_mesh(resolved.layout, device, dist.get_rank()), device)
    models.initialize(made.model, 0, holder(made.places))
    set_load(made.model)
    return made


def own_batch(made):
    section, num_rows = made.model.shape, ROWS // made.mesh.layout.data_degree
    rows = slice(made.mesh.data_rank * num_rows, (made.mesh.data_rank + 1) * num_rows)
    part = batch(section.vocab_size, section.num_mtp_layers).map(lambda tensor: tensor[rows])
    return part if made.share is None else made.share(part)


def error_ratios(*overrides):
    """By name, how much further from fp64 the ranks are than one device, worst over ranks; and copies that differ."""
    made = assembled(*overrides)
    world = World(Place(dist.get_rank(), world_size=dist.get_world_size()), torch.device("cpu"))
    part = own_batch(made)
    valid = int(world.sum([count_valid([part], made.mesh)], torch.int64))
    loss = made.passes.forward_backward([part], valid)
    made.gradients.finish()
    loss, square_sum = make_reduce_scalars(world, made.mesh)(loss, made.gradients.counted())
    model_only = tuple(override for override in overrides if not override.startswith("layout"))
    exact, one = on_one_device(model_only, torch.float64), on_one_device(model_only, torch.float32)
    ratios = {
        "loss": ratio(torch.tensor(loss), one["loss"], exact["loss"], SCALAR_FLOOR),
        "norm": ratio(torch.tensor(square_sum**0.5), one["norm"], exact["norm"], SCALAR_FLOOR),
    }
    for name, param in made.parameters.items():
        grad = held(param.grad, made.places[name])
        box = tuple(slice(a, a + n) for a, n in zip(grad.offsets, grad.tensor.shape, strict=True))
        ratios[name] = ratio(grad.tensor, one[name][box], exact[name][box]) if grad.tensor.numel() else 0.0
        if "tp" in made.places[name].copied and not same_along_tp(grad.tensor, made.mesh):
            ratios[f"{name} differs between copies"] = float("inf")
    worst = [None] * world.size
    dist.all_gather_object(worst, ratios)
    return {name: max(found.get(name, 0.0) for found in worst) for found in worst for name in found}


def ratio(spread, one, exact, floor=1e-7):
    error, of_one = (spread.double() - exact).norm(), (one.double() - exact).norm()
    return float(error / of_one.clamp(min=float(floor * exact.norm()) + 1e-12))


def same_along_tp(tensor, mesh):
    group = mesh.group("tp")
    parts = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for _ in range(mesh.layout.tp)]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return all(torch.equal(part, parts[0]) for part in parts)


def too_far(*overrides):
    """What is further from fp64 than it may be."""
    return {name: value for name, value in error_ratios(*overrides).items() if not value <= LIMIT}
