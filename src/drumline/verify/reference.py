"""What one device computes: in fp64, which is taken for the truth, and in the candidate's precision, which says how far
rounding alone goes from it.

    loss = sum over all tokens of the global batch of -log p(label) / number of labels that count

The model is the plain decoder with torch's SDPA and the logits of all tokens at once; gradients are autograd's, the
norm the root of the sum of all squares, AdamW the formula. Nothing of the training step, of its reductions or of the
own kernels takes part in fp64. Rotary tables are fp32 here too: they are inputs.
Source of AdamW: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2.
"""

import functools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from drumline import models
from drumline.capture import Tokens
from drumline.capture.files import read, write
from drumline.capture.forcing import ForcedRouting
from drumline.capture.keys import FORWARD, GRADIENT, INIT, LOSS, NORM, OPTIMIZER, ROUTING, WEIGHT, key
from drumline.capture.parts import Part, join, scalar
from drumline.capture.ratio import error_of
from drumline.capture.sink import Parts
from drumline.capture.snapshot import MOMENTS
from drumline.capture.watch import ActivationWatch
from drumline.data.made_up import made_up
from drumline.models import Attend, Routed, update_balance
from drumline.models.attention import SdpaAttend
from drumline.models.decoder import Decoder
from drumline.models.moe import MixtureOfExperts
from drumline.numerics.random import box_words
from drumline.numerics.rounding import round_stochastically
from drumline.recipe.sections import Optimizer, Recipe
from drumline.schedules import Action, Kind
from drumline.verify.candidate import NUM_STEPS
from drumline.verify.start import fill

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class Protocol:
    """How a model is trained, and what is recorded of it.

    Attributes:
        fill: gives it its first values, with the seed.
        rate: the learning rate of a step, from 1.
        num_steps: that are taken.
        watched: steps whose modules are recorded.
        kinds: that are recorded of modules.
        has_moments: optimizer states are recorded.
        forced: replaces the choices of routers in watched steps; None: they stay.
    """

    fill: Callable[[Decoder, int], None]
    rate: Callable[[int], float]
    num_steps: int
    watched: Collection[int]
    kinds: tuple[str, ...]
    has_moments: bool
    forced: ForcedRouting | None = None


def of_verify(recipe: Recipe) -> Protocol:
    """As `candidate.record` trains."""
    return Protocol(fill, lambda step: recipe.optimizer.lr, NUM_STEPS, (1,), (FORWARD,), has_moments=False)


@dataclass(frozen=True)
class Reference:
    """One device.

    Attributes:
        exact: in fp64, by key.
        ordinary: in the candidate's precision, each as one device might compute it.
    """

    exact: Tensors
    ordinary: tuple[Tensors, ...]

    @functools.cached_property
    def errors(self) -> tuple[dict[str, float], ...]:
        """How far each of one device's ways is from fp64, by key; found once for all candidates."""
        return tuple({name: error_of(way[name], x) for name, x in self.exact.items()} for way in self.ordinary)


def write_reference(recipe: Recipe, folder: Path) -> None:
    """Computes a reference and writes it into `folder`, to be read by `read_reference`."""
    write(exact(recipe, of_verify(recipe)), folder / "exact.safetensors")
    for index, parts in enumerate(ordinary(recipe)):
        write(parts, folder / f"ordinary-{index}.safetensors")


def read_reference(folder: Path) -> Reference:
    """Reads what `write_reference` wrote."""
    exact, *others = (
        {part.key: part.tensor for part in read(path)}
        for path in (folder / "exact.safetensors", *sorted(folder.glob("ordinary-*.safetensors")))
    )
    return Reference(exact, tuple(others))


def exact(recipe: Recipe, protocol: Protocol) -> list[Part]:
    """Training in fp64."""
    return _one_device(recipe, torch.float64, recipe.data.global_batch, SdpaAttend(), protocol)


def ordinary(recipe: Recipe, protocol: Protocol | None = None) -> list[list[Part]]:
    """The ways in which one device may round: the batch at once or row by row, torch's attention or the recipe's.

    One of them may hit the truth by luck, in a small tensor; all of them hardly do.
    """
    dtype, rows = DTYPES[recipe.precision.compute], recipe.data.global_batch
    own, _ = models.select(recipe.model.attention, "cpu")
    ways = ((rows, SdpaAttend()), (1, SdpaAttend()), (max(1, rows // 4), own))
    protocol = protocol or of_verify(recipe)
    return [_one_device(recipe, dtype, num_rows, attend, protocol) for num_rows, attend in ways]


def _one_device(recipe: Recipe, compute: torch.dtype, num_rows: int, attend: Attend, protocol: Protocol) -> list[Part]:
    """Some steps, some rows at a time."""
    model = models.build(
        recipe.model, compute_dtype=compute, attend=attend, cross_entropy=_cross_entropy, seed=recipe.run.seed
    )
    model.to_empty(device="cpu")
    protocol.fill(model, recipe.run.seed)
    if compute == torch.float64:
        model.double()
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    rounding = recipe.run.seed if recipe.optimizer.state_dtype == "bf16" and compute != torch.float64 else None
    adamw = _AdamW(recipe.optimizer, named, rounding)
    numbers_BT = torch.arange(recipe.data.global_batch * recipe.data.seq_len).view(-1, recipe.data.seq_len)
    parts = _whole(0, INIT, {**named, **dict(model.named_buffers())})
    tokens = Tokens(numbers_BT.split(num_rows), numbers_BT.numel())
    sink = Parts()
    watch = ActivationWatch(model, tokens, sink, kinds=protocol.kinds, forced=protocol.forced)
    for step in range(1, protocol.num_steps + 1):
        if step in protocol.watched:
            watch.start(step)
        loss, counts = _forward_backward(recipe, model, step, num_rows, watch)
        watch.stop()
        parts += _join(sink.take())
        grads = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}
        norm = float(sum(grad.double().square().sum() for grad in grads.values())) ** 0.5
        parts += [scalar(key(step, LOSS), loss), scalar(key(step, NORM), norm)]
        parts += _whole(step, GRADIENT, grads)
        parts += _whole(step, ROUTING, {f"layers.{layer}": count for layer, count in counts.items()})
        factor = min(1.0, recipe.optimizer.max_grad_norm / norm) if recipe.optimizer.max_grad_norm else 1.0
        adamw.step(grads, factor, protocol.rate(step))
        blocks: list[Any] = [*model.layers, *(module.block for module in model.mtp)]
        experts = {index: block.mlp for index, block in enumerate(blocks)}
        update_balance({i: mlp for i, mlp in experts.items() if isinstance(mlp, MixtureOfExperts)}, counts)
        if protocol.has_moments:
            parts += _whole(step, OPTIMIZER, adamw.moments())
        parts += _whole(step, WEIGHT, {**named, **dict(model.named_buffers())})
        model.zero_grad()
    return parts


def _forward_backward(
    recipe: Recipe, model: Decoder, step: int, num_rows: int, watch: ActivationWatch
) -> tuple[float, dict[int, torch.Tensor]]:
    batch = recipe.data.global_batch
    rows = made_up(recipe.data, recipe.run.seed, recipe.model).rows(np.arange((step - 1) * batch, step * batch))
    tokens, labels = torch.from_numpy(rows.tokens_BT), torch.from_numpy(rows.labels_BT)
    starts = torch.from_numpy(rows.starts_BT) if recipe.data.document_mask else None
    ahead = [(torch.from_numpy(further), torch.from_numpy(after)) for further, after in rows.ahead]
    places = torch.arange(tokens.numel()).view_as(tokens) + (step - 1) * tokens.numel()
    num_tokens = int((labels >= 0).sum())
    total, counts = 0.0, dict[int, torch.Tensor]()

    def on_routed(layer: int, routed: Routed) -> None:
        counts[layer] = counts.get(layer, 0) + routed.counts_E

    for at in range(0, batch, num_rows):
        watch.begin(Action(0, Kind.FORWARD, at // num_rows))
        some = slice(at, at + num_rows)
        loss = model(
            tokens[some],
            starts_BT=None if starts is None else starts[some],
            labels_BT=labels[some],
            ahead=[(further[some], after[some]) for further, after in ahead],
            on_routed=on_routed,
            places_BT=places[some],
        )
        loss = loss / num_tokens
        loss.backward()
        total += float(loss.detach())
    return total, counts


def _cross_entropy(hidden_ND: torch.Tensor, weight_VD: torch.Tensor, labels_N: torch.Tensor) -> torch.Tensor:
    logits_NV = hidden_ND @ weight_VD.to(hidden_ND.dtype).t()
    wide = torch.promote_types(logits_NV.dtype, torch.float32)
    return F.cross_entropy(logits_NV.to(wide), labels_N, reduction="sum", ignore_index=-100)


def _join(parts: list[Part]) -> list[Part]:
    """Each module's parts as one."""
    tensors = join([parts]).tensors
    return [Part(name, tuple(tensor.shape), tensor, (0,) * tensor.ndim) for name, tensor in tensors.items()]


def _whole(step: int, kind: str, tensors: Tensors) -> list[Part]:
    return [
        Part(key(step, kind, name), tuple(tensor.shape), tensor.detach().clone(), (0,) * tensor.ndim)
        for name, tensor in tensors.items()
    ]


class _AdamW:
    """m, v and the step, in the dtype of the weights; matrices decay, vectors do not.

    With a seed, m and v are rounded to bf16 between steps, by the random numbers that any layout rounds them by.
    """

    def __init__(self, section: Optimizer, weights: Tensors, seed: int | None):
        self._section, self._weights, self._count, self._seed = section, weights, 0, seed
        self._moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}

    def moments(self) -> Tensors:
        """Both moments of every parameter, by its name and torch's of the moment."""
        pairs = self._moments.items()
        return {f"{name}.{moment}": x for name, pair in pairs for moment, x in zip(MOMENTS, pair, strict=True)}

    @torch.no_grad()
    def step(self, grads: Tensors, factor: float, lr: float) -> None:
        """Moves the weights by gradients that are scaled by `factor` first."""
        self._count += 1
        o, n = self._section, self._count
        for name, weight in self._weights.items():
            grad, (m, v) = grads[name] * factor, self._moments[name]
            m.copy_(o.beta1 * m + (1 - o.beta1) * grad)
            v.copy_(o.beta2 * v + (1 - o.beta2) * grad * grad)
            if weight.ndim >= 2:
                weight.mul_(1 - lr * o.weight_decay)
            m_hat, v_hat = m / (1 - o.beta1**n), v / (1 - o.beta2**n)
            weight.sub_(lr * m_hat / (v_hat.sqrt() + o.eps))
            if self._seed is not None:
                shape = tuple(weight.shape)
                drawn = box_words(self._seed, f"rounding/{name}/{n}", shape, (0,) * len(shape), shape)
                m.copy_(round_stochastically(m, drawn & 0xFFFF))
                v.copy_(round_stochastically(v, drawn >> 16))
