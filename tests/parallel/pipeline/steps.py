"""One step of a small model through a pipeline, and the same step on one device."""

from dataclasses import dataclass

import torch

from drumline import models, precision
from drumline.comm import read_place
from drumline.comm.world import World
from drumline.data import Batch
from drumline.data.batch import Ahead
from drumline.parallel import build_mesh, holder
from drumline.recipe import Recipe
from drumline.recipe.sections import Model
from drumline.train.scalars import make_reduce_scalars
from drumline.train.spread import spread
from drumline.train.step import validate

B, T, V = 2, 16, 96
CPU = torch.device("cpu")
SMALL = Model(
    num_layers=8,
    dim=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    hidden_dim=48,
    vocab_size=V,
    attention="sdpa",
    init_std=0.2,
)


def changed(**updates) -> Model:
    return SMALL.model_copy(update=updates)


@dataclass
class Found:
    """What a step gave on a rank: the gradients of the parameters that it holds, all else for the whole model."""

    loss: float
    norm: float
    validation: float
    gradients: dict[str, torch.Tensor]
    loads: dict[int, torch.Tensor]


def micro_batches(number: int, num_ahead: int = 0) -> list[Batch]:
    """Micro-batches with documents, and with unequal numbers of labels that count."""
    generator = torch.Generator().manual_seed(7)
    batches = []
    for index in range(number):
        tokens = torch.randint(V, (B, T + 1), generator=generator)
        labels = tokens[:, 1:].clone()
        labels[0, : 3 * index % T] = -100
        starts = torch.zeros(B, T, dtype=torch.int32)
        starts[0, 5:] = 5
        rolled = [(tokens[:, :-1].roll(-depth, 1), labels.roll(-depth, 1)) for depth in range(1, num_ahead + 1)]
        batches.append(Batch(tokens[:, :-1], labels, starts, tuple(Ahead(*pair) for pair in rolled)))
    return batches


def num_tokens(batches: list[Batch]) -> int:
    return sum(batch.num_tokens for batch in batches)


def on_one_device(model: Model, number: int, dtype: torch.dtype = torch.float64) -> Found:
    """The step without any of the code that spreads it: in fp64 the truth."""
    decoder = models.build(model, compute_dtype=dtype, attend=models.select("sdpa", CPU)[0], device="cpu")
    models.initialize(decoder, 0)
    decoder.to(dtype)
    batches, loads = micro_batches(number, model.num_mtp_layers), {}
    set_load(decoder)
    with torch.no_grad():
        validation = sum(float(decoder(b.tokens_BT, starts_BT=b.starts_BT, labels_BT=b.labels_BT)) for b in batches)

    def on_routed(layer, routed):
        loads[layer] = loads.get(layer, 0) + routed.counts_E

    losses = [
        decoder(b.tokens_BT, starts_BT=b.starts_BT, labels_BT=b.labels_BT, ahead=b.ahead, on_routed=on_routed)
        for b in batches
    ]
    loss = sum(losses) / num_tokens(batches)
    loss.backward()
    gradients = {name: param.grad for name, param in decoder.named_parameters()}
    norm = torch.cat([grad.double().flatten() for grad in gradients.values()]).norm()
    return Found(float(loss.detach()), float(norm), validation / num_tokens(batches), gradients, loads)


def set_load(model) -> None:
    """The choices of the step before, uneven, which the balancing loss needs."""
    for block in model.layers:
        router = getattr(block.mlp, "router", None)
        if router is not None and router.load is not None:
            router.load.copy_(torch.linspace(0.1, 0.9, len(router.load)))


def through_pipeline(model: Model, number: int, watch=None, **layout) -> Found:
    """The step as a run takes it, on this rank of a joined world; gradients are whole on every rank that holds them."""
    recipe = Recipe.model_validate(
        {
            "model": model.model_dump(),
            "layout": layout,
            "data": {"global_batch": number * B, "micro_batch": B, "seq_len": T},
        }
    )
    world = World(read_place(), CPU)
    mesh = build_mesh(recipe.layout, CPU, world.rank)
    batches = micro_batches(number, model.num_mtp_layers)[mesh.data_rank :: recipe.layout.data_degree]
    attend, _ = models.select("sdpa", CPU)

    def build(part):
        return models.build(model, compute_dtype=torch.float32, attend=attend, part=part)

    ours = spread(recipe, mesh, build, precision.policy(recipe.precision), CPU)
    models.initialize(ours.model, 0, holder(ours.places))
    set_load(ours.model)
    reduce = make_reduce_scalars(world, mesh)
    validation, counted = validate(ours.passes, ours.model, [batches], world, mesh, reduce)
    assert counted == num_tokens(micro_batches(number))
    ours.gradients.zero_grad()
    loads = {}

    def on_routed(layer, routed):
        loads[layer] = loads.get(layer, 0) + routed.counts_E

    parameters = dict(ours.model.named_parameters())
    loss = ours.passes.forward_backward(batches, counted, on_routed, None, watch)
    ours.gradients.finish()
    loss_sum, squares = reduce(loss, ours.gradients.counted())
    gradients = {
        name: param.grad.full_tensor() if hasattr(param.grad, "full_tensor") else param.grad
        for name, param in parameters.items()
    }
    if recipe.layout.data_degree > 1:
        loads = {}  # of this rank's tokens only
    for stage in getattr(ours.passes, "stages", {}).values():
        assert stage.num_in_flight == 0
    return Found(loss_sum, squares**0.5, validation, gradients, loads)


def assert_same_step(found: Found, truth: Found, one: Found) -> None:
    """Holds a rank's step in fp32 to the truth in fp64: it may err about as much as one device in fp32 does.

    Raises:
        AssertionError: it errs more, or gradients are missing.
    """
    assert abs(found.loss - truth.loss) <= 4 * abs(one.loss - truth.loss) + 3e-7 * truth.loss
    assert abs(found.validation - truth.validation) <= 1e-6 * truth.validation
    assert abs(found.norm - truth.norm) <= 3e-6 * truth.norm
    assert found.gradients
    for name, grad in found.gradients.items():
        own = (grad.double() - truth.gradients[name]).norm()
        theirs = (one.gradients[name].double() - truth.gradients[name]).norm()
        assert own <= 2 * theirs + 1e-7 * truth.gradients[name].norm(), f"{name}: {own:.3g} against {theirs:.3g}"
    for layer, load in found.loads.items():
        assert torch.equal(load, truth.loads[layer]), f"layer {layer}"
