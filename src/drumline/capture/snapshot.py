"""What a rank holds of weights, buffers, moments and gradients, given to a sink under logical names."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from drumline.capture.keys import GRADIENT, OPTIMIZER, key
from drumline.capture.sink import Parts
from drumline.parallel import Mesh, Places, held

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A model in its layout, as far as it is recorded.

    Attributes:
        model: spread over the mesh.
        mesh: of the layout.
        parameters: trained ones, by logical name.
        places: where each lies in its logical tensor.
        buffers: by logical name; whole on every rank that has them.
        optimizer: over the parameters.
    """

    model: nn.Module
    mesh: Mesh
    parameters: Mapping[str, nn.Parameter]
    places: Places
    buffers: Mapping[str, torch.Tensor]
    optimizer: torch.optim.Optimizer


def add_weights(sink: Parts, subject: Subject, step: int, kind: str) -> None:
    """Parameters and buffers, as they are now."""
    for name, param in subject.parameters.items():
        _add(sink, subject, key(step, kind, name), name, param)
    for name, buffer in subject.buffers.items():
        sink.add(key(step, kind, name), tuple(buffer.shape), buffer.detach(), offsets=(0,) * buffer.ndim)


def add_gradients(sink: Parts, subject: Subject, step: int) -> None:
    """Gradients of parameters; zero where a parameter has none."""
    for name, param in subject.parameters.items():
        grad = torch.zeros_like(param) if param.grad is None else param.grad
        _add(sink, subject, key(step, GRADIENT, name), name, grad)


def add_moments(sink: Parts, subject: Subject, step: int, kind: str = OPTIMIZER) -> None:
    """AdamW's moments; none before its first step."""
    for name, param in subject.parameters.items():
        state = subject.optimizer.state.get(param, {})
        for moment in MOMENTS:
            if moment in state:
                _add(sink, subject, key(step, kind, f"{name}.{moment}"), name, state[moment])


def _add(sink: Parts, subject: Subject, text: str, name: str, tensor: torch.Tensor) -> None:
    part = held(tensor, subject.places[name])
    sink.add(text, part.shape, part.tensor, offsets=part.offsets)
