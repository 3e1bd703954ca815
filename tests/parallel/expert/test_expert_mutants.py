"""The comparison with one device turns red where a fault is put in: each of these was met in the field."""

import pytest
import torch
import torch.distributed as dist
from tests.parallel.expert.comparison import Case, error, on_one_device
from tests.ranks import ranks

from drumline.models.moe import balance, layer
from drumline.parallel.expert import dispatch as spread
from drumline.parallel.expert import exchange
from drumline.parallel.expert import shard as expert_shard

LIMIT = 1e-11
CASE = Case("fsdp4.ep2", "aux_loss")


class Reduce:
    """A reduction of the experts' gradients that FSDP is given in place of its own."""

    def __init__(self, reduce):
        self.reduce = reduce

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        chunks = [torch.empty_like(input_tensor) for _ in range(group.size())]
        dist.all_gather(chunks, input_tensor.contiguous(), group=group)
        parts = [chunk.view(group.size(), -1)[group.rank()] for chunk in chunks]
        output_tensor.copy_(self.reduce(parts, group.rank()).view_as(output_tensor))


def reduced_by(patch, reduce):
    real = expert_shard.fully_shard

    def made(module, **options):
        real(module, **options)
        module.set_custom_reduce_scatter(Reduce(reduce))

    patch(expert_shard, "fully_shard", made)


def nothing(patch):
    reduced_by(patch, lambda parts, rank: sum(parts))


def experts_gradient_is_not_summed_over_efsdp(patch):
    reduced_by(patch, lambda parts, rank: parts[rank])


def experts_gradient_is_scaled_by_ep(patch):
    reduced_by(patch, lambda parts, rank: sum(parts) * 2)


def experts_gradient_is_averaged(patch):
    reduced_by(patch, lambda parts, rank: sum(parts) / len(parts))


def router_misses_the_term_through_the_weights(patch):
    real = spread.combine_rows
    patch(spread, "combine_rows", lambda y, weights, plan: real(y, weights.detach(), plan))


def tokens_miss_the_gradient_of_their_experts(patch):
    patch(exchange._Depart, "backward", lambda ctx, grad: (torch.zeros_like(ctx.exchange.wait()), None))


def rows_go_back_in_the_order_of_the_experts(patch):
    real = spread.order_by_expert
    patch(spread, "order_by_expert", lambda counts, num: (real(counts, num)[0], torch.arange(num)))


def the_order_is_taken_for_its_inverse(patch):
    real = spread.order_by_expert
    patch(spread, "order_by_expert", lambda counts, num: real(counts, num)[::-1])


def received_counts_are_of_the_other_expert(patch):
    real = dist.all_to_all_single

    def flipped(output, given, *args, **kwargs):
        work = real(output, given, *args, **kwargs)
        if output.dtype == torch.int64:
            work.wait()
            output.copy_(output.flip(1))  # their sums stay
        return work

    patch(dist, "all_to_all_single", flipped)


def aux_loss_is_counted_on_every_rank_of_the_group(patch):
    real = balance.balance_loss
    patch(layer, "balance_loss", lambda probability, load: 2 * real(probability, load))


FAULTS = (
    experts_gradient_is_not_summed_over_efsdp,
    experts_gradient_is_scaled_by_ep,
    experts_gradient_is_averaged,
    router_misses_the_term_through_the_weights,
    tokens_miss_the_gradient_of_their_experts,
    rows_go_back_in_the_order_of_the_experts,
    the_order_is_taken_for_its_inverse,
    received_counts_are_of_the_other_expert,
    aux_loss_is_counted_on_every_rank_of_the_group,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
@ranks(4)
def test_the_comparison_turns_red(fault, monkeypatch):
    on_one_device(CASE.kind)  # before the fault, which may reach one device, too; it is remembered
    fault(monkeypatch.setattr)
    found = error(CASE)
    assert not all(value <= LIMIT for value in found.values()), found


@ranks(4)
def test_without_a_fault_it_is_green(monkeypatch):
    nothing(monkeypatch.setattr)  # the way in which the faults are put in is none itself
    found = error(CASE)
    assert all(value <= LIMIT for value in found.values()), found
