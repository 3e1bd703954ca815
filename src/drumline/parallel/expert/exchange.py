"""Rows sent between ranks, each rank a number of its own to each other one, while the sender goes on computing.

    forward    depart: starts to send       ...      arrive: waits
    backward   depart: waits                ...      arrive: starts to send the gradients back

The two ends of an exchange are two nodes of the graph, so that what is computed between them in the forward (shared
experts) has its backward between them, too. What lies between the ends is on its way: nothing may read it. Gradients on
their way are kept beside the graph, which wants a gradient in the shape of the rows that arrived.
Source: the all-to-all of GShard, arXiv:2006.16668, section 3.2.2; overlapped with shared experts:
arXiv:2404.05019 (ScMoE), section 3.

R rows, D model width.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Route:
    """How many rows go where.

    Attributes:
        group: the ranks.
        sent: rows for each rank, in their order; the rows that are sent are the first ones.
        received: rows from each rank.
        num_rows: rows to send from, those beyond the sum of `sent` stay; they come back as anything.
        num_received: rows to receive into, in the same way.
    """

    group: dist.ProcessGroup
    sent: tuple[int, ...]
    received: tuple[int, ...]
    num_rows: int
    num_received: int

    @property
    def back(self) -> "Route":
        """The way back."""
        return replace(
            self, sent=self.received, received=self.sent, num_rows=self.num_received, num_received=self.num_rows
        )


class Exchange:
    """One exchange and the one of its gradients.

    Args:
        route: how many rows go where.
    """

    def __init__(self, route: Route):
        self._route = route
        self._on_its_way: tuple[dist.Work, torch.Tensor, torch.Tensor] | None = None

    def depart(self, rows_RD: torch.Tensor) -> torch.Tensor:
        """Starts to send rows.

        Args:
            rows_RD: [num_rows, D].

        Returns:
            [num_received, D], for `arrive` alone.
        """
        return _Depart.apply(rows_RD, self)  # pyright: ignore[reportReturnType]

    def arrive(self, rows_RD: torch.Tensor) -> torch.Tensor:
        """Waits for what `depart` gave; rows beyond those received hold anything."""
        return _Arrive.apply(rows_RD, self)  # pyright: ignore[reportReturnType]

    def start(self, rows_RD: torch.Tensor, route: Route) -> torch.Tensor:
        """Sends along a route without waiting."""
        made = rows_RD.new_empty(route.num_received, *rows_RD.shape[1:])
        sent = rows_RD[: sum(route.sent)].contiguous()
        work = dist.all_to_all_single(
            made[: sum(route.received)], sent, list(route.received), list(route.sent), group=route.group, async_op=True
        )
        assert work is not None
        self._on_its_way = work, made, sent  # what is sent must live until it has been
        return made

    def wait(self) -> torch.Tensor:
        """What was started, once it is there."""
        assert self._on_its_way is not None, "an exchange is waited for once"
        work, made, _ = self._on_its_way
        work.wait()
        self._on_its_way = None
        return made

    @property
    def route(self) -> Route:
        """Of the forward."""
        return self._route


class _Depart(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, exchange):
        ctx.exchange = exchange
        return exchange.start(rows_RD, exchange.route)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.exchange.wait(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, exchange):
        ctx.exchange = exchange
        exchange.wait()
        return rows_RD

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.exchange.start(grad_outputs[0], ctx.exchange.route.back)
        return grad_outputs[0], None  # says only that the gradient has set out
