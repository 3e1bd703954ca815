"""How tokens enter what is shared out over ranks, and leave it: as shares of them, or all of them on every rank.

With sequence parallelism the all-reduce after a row-parallel matmul becomes a reduce-scatter over tokens, and a gather
before the next column-parallel one brings them back: the same bytes in the forward. What lies between, norms and the
residual stream, works on shares; and only the share is kept for the backward, which gathers it again.
Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.

T tokens, S tokens of a rank's share, D model width, F width of what a rank computes.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch.autograd.function import once_differentiable

from drumline.models.layers import Linear
from drumline.parallel.tensor.collectives import (
    Ranks,
    copy,
    gather_tokens,
    joined,
    reduce,
    scatter_tokens,
    shares,
    start_gather,
    start_scatter,
)


class Tokens(Protocol):
    """What lies between matmuls."""

    def enter(self, x: torch.Tensor, /) -> torch.Tensor:
        """[..., D] between matmuls to all tokens, whose gradients are then partial sums."""
        ...

    def leave(self, x: torch.Tensor, /) -> torch.Tensor:
        """A rank's summand of all tokens to what lies between matmuls."""
        ...

    def project(self, x: torch.Tensor, layers: Sequence[Linear], /) -> Sequence[torch.Tensor]:
        """Column-parallel layers of what enters."""
        ...

    def merge(self, x: torch.Tensor, layer: Linear, /) -> torch.Tensor:
        """A row-parallel layer, whose result leaves."""
        ...

    def own(self, x_BT: torch.Tensor, /) -> torch.Tensor:
        """Of something about all tokens, that about those which this rank holds between matmuls."""
        ...


class SameTokens:
    """All ranks hold all tokens.

    Args:
        ranks: of the group.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """As `Tokens`."""
        return copy(x, self._ranks)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """As `Tokens`."""
        return reduce(x, self._ranks)

    def project(self, x: torch.Tensor, layers: Sequence[Linear]) -> Sequence[torch.Tensor]:
        """As `Tokens`."""
        entered = self.enter(x)
        return [layer(entered) for layer in layers]

    def merge(self, x: torch.Tensor, layer: Linear) -> torch.Tensor:
        """As `Tokens`."""
        return self.leave(torch.nn.functional.linear(x, layer.weight.to(x.dtype)))

    def own(self, x_BT: torch.Tensor) -> torch.Tensor:
        """As `Tokens`."""
        return x_BT


class Matmuls(Protocol):
    """Matmuls of all tokens where ranks hold shares of them."""

    def gather(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Multiplies all tokens.

        Args:
            x: this rank's share, [..., S, D].
            weights: each [D, F].

        Returns:
            x W of all tokens [..., T, F] for each weight, and all tokens [..., T, D].
        """
        ...

    def scatter(self, factors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], torch.Tensor]:
        """Starts to sum products over factors and ranks.

        Args:
            factors: pairs of [..., T, F] and [F, D].

        Returns:
            What waits and gives this rank's share of the sum, [..., S, D].
        """
        ...


class AtOnce:
    """Each transfer in one collective.

    Args:
        ranks: of the group.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def gather(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """As `Matmuls`."""
        whole = joined(start_gather(x, self._ranks)())
        return [whole @ weight for weight in weights], whole

    def scatter(self, factors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], torch.Tensor]:
        """As `Matmuls`."""
        return start_scatter(shares(sum_of_products(factors), self._ranks.degree), self._ranks)


class SharedTokens:
    """Each rank holds a share of the tokens.

    Args:
        ranks: of the group.
        matmuls: how transfers and matmuls go together.
    """

    def __init__(self, ranks: Ranks, matmuls: Matmuls):
        self._ranks = ranks
        self._matmuls = matmuls

    def enter(self, x: torch.Tensor) -> torch.Tensor:
        """As `Tokens`."""
        return gather_tokens(x, self._ranks)

    def leave(self, x: torch.Tensor) -> torch.Tensor:
        """As `Tokens`."""
        return scatter_tokens(x, self._ranks)

    def project(self, x: torch.Tensor, layers: Sequence[Linear]) -> Sequence[torch.Tensor]:
        """As `Tokens`; one gather feeds all layers."""
        weights = [layer.weight.to(x.dtype) for layer in layers]
        return _Project.apply(x, self._ranks, self._matmuls, *weights)  # pyright: ignore[reportReturnType]

    def merge(self, x: torch.Tensor, layer: Linear) -> torch.Tensor:
        """As `Tokens`."""
        return _Merge.apply(x, layer.weight.to(x.dtype), self._matmuls)  # pyright: ignore[reportReturnType]

    def own(self, x_BT: torch.Tensor) -> torch.Tensor:
        """As `Tokens`."""
        return x_BT.unflatten(1, (self._ranks.degree, -1))[:, self._ranks.rank]


class _Project(torch.autograd.Function):
    """Keeps the share: the backward gathers it again behind one matmul, and sums the input's gradient behind others."""

    @staticmethod
    def forward(ctx, x, ranks, matmuls, *weights):
        ctx.ranks, ctx.matmuls = ranks, matmuls
        ctx.save_for_backward(x, *weights)
        found, _ = matmuls.gather(x, [weight.t() for weight in weights])
        return tuple(found)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *weights = ctx.saved_tensors
        gathered = start_gather(x, ctx.ranks)
        grad_x = ctx.matmuls.scatter(list(zip(grad_outputs, weights, strict=True)))
        whole = joined(gathered())
        grad_weights = [grad_of_weight(grad, whole) for grad in grad_outputs]
        return grad_x(), None, None, *grad_weights


class _Merge(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, matmuls):
        ctx.matmuls = matmuls
        ctx.save_for_backward(x, weight)
        return matmuls.scatter([(x, weight.t())])()

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight = ctx.saved_tensors
        (grad_x,), whole = ctx.matmuls.gather(grad_outputs[0], [weight])
        return grad_x, grad_of_weight(whole, x), None


def sum_of_products(factors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """The sum of x W over pairs of [..., F] and [F, D]."""
    (first, weight), *others = factors
    found = (first @ weight).flatten(0, -2)
    for x, weight in others:
        found = torch.addmm(found, x.flatten(0, -2), weight)
    return found.view(*first.shape[:-1], -1)


def grad_of_weight(grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """dW of y = x W^T over all tokens: grad^T x."""
    return grad.flatten(0, -2).t() @ x.flatten(0, -2)
