"""A mixture of experts in fixed pieces: chunks of each sender's tokens, blocks of the experts' hidden width.

    chunks between matmuls -> all chunks of this rank -> rows by expert and chunk -> their ranks -> experts
                           <-  own share of the chunks <- weighted sums of a token's experts <-

Every tensor-parallel rank sends the same rows, since it has blocks of the same experts, and gets back sums over all
blocks: what it then does with them, each of its group does alike, so that entering is a gather whose backward takes the
own share, and not a sum.
The gradient of an expert's weights is kept apart by whose data it is of: micro-batches of several data-parallel ranks
come at once, and are summed by their lanes as on one rank.

B sequences, T tokens, C chunks, R rows of a chunk, N = C R tokens, K experts of a token, E experts, Q rows for experts,
D model width, P ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from drumline.models.moe import Experts, MixtureOfExperts, Routed, balance_loss, sort_by_expert
from drumline.models.moe.dispatch import count_choices
from drumline.numerics.exact import chunked, column_blocks, mirrored, unchunked, wide
from drumline.numerics.exact.experts import (
    ExpertGradients,
    Run,
    Weights,
    expert_rows,
    expert_rows_backward,
    runs_of,
)
from drumline.numerics.exact.swiglu import Sigmoid
from drumline.parallel.exact.pieces import Pieces, summed
from drumline.parallel.exact.router import whole_linear
from drumline.parallel.expert.exchange import Exchange, Route
from drumline.parallel.tensor.collectives import start_gather

PutDown = Callable[[int, str, torch.Tensor], None]
"""(whose data, "gate_proj" and so on, the gradient of a micro-batch)."""


@dataclass(frozen=True)
class Senders:
    """The ranks of which each has some of the experts, and sends to all.

    Attributes:
        group: theirs; None: this rank has all experts.
        data_ranks: of each, whose data it has.
        chunks: of each, the numbers of its chunks.
    """

    group: dist.ProcessGroup | None
    data_ranks: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]

    def orders(self, num_chunks: int) -> dict[int, list[int]]:
        """Of each data rank, the numbers of the chunks that come, as leaves of a sum."""
        found: dict[int, list[int]] = {}
        for data_rank, numbers in zip(self.data_ranks, self.chunks, strict=True):
            found.setdefault(data_rank, []).extend(numbers)
        return {rank: [numbers[i] for i in mirrored(numbers, num_chunks)] for rank, numbers in found.items()}


class ExactExperts:
    """The forward of a stack of experts, on runs of rows.

    Args:
        experts: weights are this rank's.
        pieces: of this rank.
        senders: who sends rows.
    """

    def __init__(self, experts: Experts, pieces: Pieces, senders: Senders):
        self._experts = experts
        self._pieces = pieces
        self._orders = senders.orders(pieces.num_chunks)
        # Ranks that share out experts send each other all chunks of their sequences.
        self._has_all_chunks = senders.group is not None
        self.put_down: PutDown | None = None
        """Where gradients go whose senders are several; None: to autograd."""

    def __call__(self, rows_QD: torch.Tensor, runs: Sequence[Run]) -> torch.Tensor:
        experts = self._experts
        weights = experts.gate_proj.weight, experts.up_proj.weight, experts.down_proj.weight
        how = runs, self._orders, self._pieces, self._has_all_chunks, self.put_down
        return _ExpertRows.apply(rows_QD, *weights, how)  # pyright: ignore[reportReturnType]


class ExactMixture:
    """The forward of a mixture of experts.

    Args:
        layer: the layer; its shared experts have a forward of their own.
        pieces: of this rank.
        senders: who sends rows.
    """

    def __init__(self, layer: MixtureOfExperts, pieces: Pieces, senders: Senders):
        self._layer = layer
        self._pieces = pieces
        self._senders = senders

    def __call__(self, x_BTD: torch.Tensor) -> tuple[torch.Tensor, Routed]:
        layer, pieces = self._layer, self._pieces
        x_CRD = chunked(x_BTD, pieces.num_between).contiguous()
        # Through the module, whose hooks record what it says and may change it.
        routing = layer.router(x_CRD, len(x_BTD))
        experts_CRK, weights_CRK, probability_CRE = (
            chunked(field_N.unflatten(0, x_BTD.shape[:2]), pieces.num_between).contiguous() for field_N in routing[:3]
        )
        y_CRD = self._experts(_whole(x_CRD, pieces), _whole(weights_CRK, pieces), pieces.enter(experts_CRK))
        y_BTD = unchunked(_share(y_CRD, pieces), len(x_BTD))
        if layer.shared is not None:
            shared_BTD = layer.shared(x_BTD)
            if layer.shared_gate is not None:
                gate_CR1: torch.Tensor = Sigmoid.apply(  # pyright: ignore[reportAssignmentType]
                    whole_linear(x_CRD, layer.shared_gate.weight, x_CRD.dtype, pieces)
                )
                shared_BTD = unchunked(gate_CR1, len(x_BTD)) * shared_BTD
            y_BTD = y_BTD + shared_BTD
        return y_BTD, self._report(experts_CRK.flatten(0, 1), probability_CRE.flatten(0, 1))

    def _experts(self, x_CRD: torch.Tensor, weights_CRK: torch.Tensor, experts_CRK: torch.Tensor) -> torch.Tensor:
        num_experts = self._layer.moe.num_experts
        plan = sort_by_expert(experts_CRK.flatten(0, 1), num_experts, False)
        slot_CRK = plan.slot_NK.view(experts_CRK.shape)
        rows_QD: torch.Tensor = _ToExperts.apply(x_CRD, plan.choice_R, slot_CRK)  # pyright: ignore
        sent_CE = torch.stack([count_choices(chosen_RK, num_experts) for chosen_RK in experts_CRK])
        if self._senders.group is None:
            runs = runs_of([sent_CE.tolist()], self._senders.data_ranks, self._senders.chunks)
            y_QD = self._layer.experts(rows_QD, runs)
        else:
            y_QD = self._across(rows_QD, sent_CE, self._senders.group)
        return _FromExperts.apply(y_QD, weights_CRK, plan.choice_R, slot_CRK)  # pyright: ignore

    def _across(self, rows_QD: torch.Tensor, sent_CE: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        sent_PCE = sent_CE.unflatten(1, (group.size(), -1)).movedim(1, 0).contiguous()
        counts_PCE = torch.empty_like(sent_PCE)
        dist.all_to_all_single(counts_PCE, sent_PCE, group=group)
        counts = counts_PCE.tolist()
        received = tuple(sum(map(sum, counts_CE)) for counts_CE in counts)
        sent = tuple(sent_PCE.sum((1, 2)).tolist())
        there = Exchange(Route(group, sent, received, len(rows_QD), sum(received)))
        back = Exchange(there.route.back)
        runs = runs_of(counts, self._senders.data_ranks, self._senders.chunks)
        return back.arrive(back.depart(self._layer.experts(there.arrive(there.depart(rows_QD)), runs)))

    def _report(self, experts_NK: torch.Tensor, probability_NE: torch.Tensor) -> Routed:
        layer = self._layer
        aux_loss = probability_NE.new_zeros(())
        if layer.router.load is not None:
            aux_loss = layer.moe.aux_loss_coefficient * balance_loss(probability_NE, layer.router.load)
        return Routed(
            counts_E=count_choices(experts_NK, layer.moe.num_experts),
            num_dropped=experts_NK.new_zeros(()),
            entropy=torch.special.entr(probability_NE.detach()).sum(),
            aux_loss=aux_loss,
        )


class _ExpertRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows_QD, gate_EFD, up_EFD, down_EDF, how):
        runs, _, pieces, *_ = ctx.how = how
        rows_QD = rows_QD.contiguous()
        y_QD, gate_up_bQF = expert_rows(rows_QD, _in_blocks(gate_EFD, up_EFD, down_EDF, rows_QD.dtype, pieces), runs)
        ctx.save_for_backward(rows_QD, gate_up_bQF, gate_EFD, up_EFD, down_EDF)
        # A copy, since what ranks summed is a view, of which FSDP warns.
        return _over_blocks(y_QD, pieces).to(rows_QD.dtype, copy=pieces.tensor is not None)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        rows_QD, gate_up_bQF, *masters = ctx.saved_tensors
        runs, orders, pieces, has_all_chunks, put_down = ctx.how
        weights = _in_blocks(masters[0], masters[1], masters[2], rows_QD.dtype, pieces)
        gradients = ExpertGradients(weights, orders)
        grad_QD = grad_outputs[0].to(rows_QD.dtype).contiguous()
        found_QD = expert_rows_backward(grad_QD, rows_QD, gate_up_bQF, weights, runs, gradients)
        grad_rows_QD = _over_blocks(found_QD, pieces).to(rows_QD.dtype)
        if put_down is not None:
            for data_rank, found in gradients.take():
                for name, grad in _as_weights(found).items():
                    put_down(data_rank, name, grad)
            return grad_rows_QD, None, None, None, None
        ((_, found),) = gradients.take()
        if not has_all_chunks:
            found = Weights(*map(pieces.over_chunks, found))
        return grad_rows_QD, *_as_weights(found).values(), None


def _in_blocks(gate_EFD, up_EFD, down_EDF, dtype: torch.dtype, pieces: Pieces) -> Weights:
    num_blocks = pieces.own_blocks
    cut = [weight.to(dtype).unflatten(1, (num_blocks, -1)) for weight in (gate_EFD, up_EFD)]
    down = torch.stack([column_blocks(weight_DF.to(dtype), num_blocks) for weight_DF in down_EDF])
    return Weights(torch.cat(cut, dim=2), down)


def _as_weights(blocks: Weights) -> Mapping[str, torch.Tensor]:
    gate_EbFD, up_EbFD = blocks.gate_up_EbFD.chunk(2, dim=2)
    down_EDF = blocks.down_EbDF.movedim(1, 2).flatten(2)
    return {"gate_proj": gate_EbFD.flatten(1, 2), "up_proj": up_EbFD.flatten(1, 2), "down_proj": down_EDF}


def _over_blocks(partial_QD: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    return partial_QD if pieces.tensor is None else summed(partial_QD, pieces.tensor)


class _ToExperts(torch.autograd.Function):
    """Tokens as rows in the order of their experts. A token's gradients add up in the order of its choices."""

    @staticmethod
    def forward(ctx, x_CRD, choice_Q, slot_CRK):
        ctx.save_for_backward(slot_CRK)
        return x_CRD.flatten(0, 1)[choice_Q // slot_CRK.shape[2]]

    @staticmethod
    def backward(ctx, *grad_outputs):
        (slot_CRK,) = ctx.saved_tensors
        total = sum(grad_outputs[0][slot_CR].to(wide(grad_outputs[0].dtype)) for slot_CR in slot_CRK.unbind(2))
        assert isinstance(total, torch.Tensor)
        return total.to(grad_outputs[0].dtype), None, None


class _FromExperts(torch.autograd.Function):
    """The weighted sum of a token's rows, in the order of its choices."""

    @staticmethod
    def forward(ctx, y_QD, weights_CRK, choice_Q, slot_CRK):
        ctx.save_for_backward(y_QD, weights_CRK, choice_Q, slot_CRK)
        dtype = wide(y_QD.dtype)
        choices = zip(slot_CRK.unbind(2), weights_CRK.unbind(2), strict=True)
        total = sum(y_QD[slot_CR].to(dtype) * weight_CR[..., None] for slot_CR, weight_CR in choices)
        assert isinstance(total, torch.Tensor)
        return total.to(y_QD.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grad_outputs):  # pyright: ignore[reportIncompatibleMethodOverride]
        y_QD, weights_CRK, choice_Q, slot_CRK = ctx.saved_tensors
        grad_CRD = grad_outputs[0].to(wide(y_QD.dtype))
        weight_Q1 = weights_CRK.flatten()[choice_Q, None]
        grad_y_QD = grad_CRD.flatten(0, 1)[choice_Q // slot_CRK.shape[2]] * weight_Q1
        products = (
            torch.stack([(y_QD[slot_R] * grad_RD).sum(-1) for slot_R in slot_RK.unbind(1)], dim=-1)
            for slot_RK, grad_RD in zip(slot_CRK, grad_CRD, strict=True)
        )
        return grad_y_QD.to(y_QD.dtype), torch.stack(list(products)).to(weights_CRK.dtype), None, None


def _whole(x_C: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """All chunks of a rank from those between matmuls; the backward takes the own share of what all ranks have."""
    return x_C if not pieces.shares_tokens else _Whole.apply(x_C, pieces)  # pyright: ignore[reportReturnType]


def _share(x_C: torch.Tensor, pieces: Pieces) -> torch.Tensor:
    """The chunks between matmuls of what all ranks have; the backward gathers."""
    return x_C if not pieces.shares_tokens else _Share.apply(x_C, pieces)  # pyright: ignore[reportReturnType]


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_C, pieces):
        ctx.ranks = pieces.tensor
        return start_gather(x_C, pieces.tensor)().flatten(0, 1)

    @staticmethod
    def backward(ctx, *grad_outputs):
        return grad_outputs[0].chunk(ctx.ranks.degree)[ctx.ranks.rank], None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_C, pieces):
        ctx.ranks = pieces.tensor
        return x_C.chunk(ctx.ranks.degree)[ctx.ranks.rank].clone()

    @staticmethod
    def backward(ctx, *grad_outputs):
        return start_gather(grad_outputs[0].contiguous(), ctx.ranks)().flatten(0, 1), None
