"""Expert parallelism: each rank of a group holds some of the experts, and tokens travel to theirs and back.

    rows by expert of the whole model  -> all-to-all ->  by source rank, local expert  -> sort ->  by local expert,
    source rank, token  -> grouped matmul ->  the same way back  -> sum with the weights

A rank's rows are sorted by expert, so those for one rank are neighbours, and the order in which rows reach an expert
says nothing of when they came: bits do not depend on it. A choice that was dropped is not sent. The weights stay with
the token: they multiply what comes back, so the router's gradient is made where its scores are.
The gradient of an expert's weights is a sum over the tokens of all ranks of the group, as the loss is: it is not
divided by anything.
Once a layer the host waits for the device: it must know how many rows come before it can make room for them.
Sources: GShard, arXiv:2006.16668, section 3.2; dropless: MegaBlocks, arXiv:2211.15841.

N tokens of this rank, K experts of a token, E experts, P ranks, L = E / P experts of a rank, R rows, D model width.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from drumline.models.moe import Dispatch, Dispatched, Plan, combine_rows, dispatch_locally, gather_rows, sort_by_expert
from drumline.parallel.expert.exchange import Exchange, Route
from drumline.parallel.mesh import Mesh


@dataclass(frozen=True)
class _Sent:
    """Tokens on their way to the experts.

    Attributes:
        plan: of this rank's choices.
        exchange: that brings them.
        rows_RD: that it gave.
        counts_PL: rows from each rank for each expert that is here.
    """

    plan: Plan
    exchange: Exchange
    rows_RD: torch.Tensor
    counts_PL: torch.Tensor

    def receive(self) -> tuple[torch.Tensor, torch.Tensor]:
        rows_RD = self.exchange.arrive(self.rows_RD)
        by_expert_R, by_source_R = self._orders()
        return _Permute.apply(rows_RD, by_expert_R, by_source_R), self.counts_PL.sum(0)  # pyright: ignore

    def combine(self, y_RD: torch.Tensor, weights_NK: torch.Tensor) -> torch.Tensor:
        by_expert_R, by_source_R = self._orders()
        back = Exchange(self.exchange.route.back)
        sent_RD = back.depart(_Permute.apply(y_RD, by_source_R, by_expert_R))  # pyright: ignore
        return combine_rows(back.arrive(sent_RD), weights_NK, self.plan)

    def _orders(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows come by source rank and then by expert; the order by expert first, and its inverse."""
        return order_by_expert(self.counts_PL, self.exchange.route.num_received)


def order_by_expert(counts_PL: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The order that brings rows sorted by (source rank, expert) to (expert, source rank), and its inverse.

    Args:
        counts_PL: int64 rows from each rank for each expert.
        num_rows: their sum, which the host knows already.

    Returns:
        Two int64 [R].
    """
    num_ranks, num_local = counts_PL.shape
    experts_PL = torch.arange(num_local, device=counts_PL.device).expand(num_ranks, -1)
    experts_R = experts_PL.flatten().repeat_interleave(counts_PL.flatten(), output_size=num_rows)
    order_R = experts_R.argsort(stable=True)
    places_R = torch.arange(num_rows, device=order_R.device)
    return order_R, torch.empty_like(order_R).scatter_(0, order_R, places_R)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_RD, order_R, inverse_R):
        ctx.save_for_backward(inverse_R)
        return rows_RD[order_R]

    @staticmethod
    def backward(ctx, *grad_outputs):
        return grad_outputs[0][ctx.saved_tensors[0]], None, None


def expert_dispatch(mesh: Mesh) -> Dispatch:
    """What carries tokens to the experts and back in a layout. All ranks of the world must call it.

    Args:
        mesh: of the layout.

    Returns:
        The dispatcher of one device where layout.ep is 1. It takes plain tokens: where tensor-parallel ranks share them
        out, they are to be gathered around it.
    """
    group = mesh.group("ep")
    return dispatch_locally if group is None else dispatch_over(group)


def dispatch_over(group: dist.ProcessGroup) -> Dispatch:
    """The dispatcher of a group whose rank i holds the i-th part of the experts."""

    def dispatch(x_ND: torch.Tensor, experts_NK: torch.Tensor, num_experts: int, may_drop: bool) -> Dispatched:
        plan = sort_by_expert(experts_NK, num_experts, may_drop)
        sent_PL = plan.counts_E.view(group.size(), -1)
        counts_PL = torch.empty_like(sent_PL)
        counting = dist.all_to_all_single(counts_PL, sent_PL, group=group, async_op=True)
        rows_RD = gather_rows(x_ND, plan)
        assert counting is not None
        counting.wait()
        sent, received = torch.stack((sent_PL.sum(1), counts_PL.sum(1))).tolist()  # the one wait of the host
        exchange = Exchange(Route(group, tuple(sent), tuple(received), len(rows_RD), sum(received)))
        return _Sent(plan, exchange, exchange.depart(rows_RD), counts_PL)

    return dispatch
