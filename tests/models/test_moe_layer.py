"""Experts, dispatch, shared experts and what a layer reports: against loops, gradcheck and transformers' Qwen2-MoE."""

import pytest
import torch
import torch.nn.functional as F
from transformers import Qwen2MoeConfig
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from drumline.models.moe import (
    MixtureOfExperts,
    combine_rows,
    dispatch_locally,
    gather_rows,
    grouped_linear,
    sort_by_expert,
)
from drumline.recipe.sections import Moe

D = 16


def layer(moe: Moe, dtype: torch.dtype = torch.float32, dispatch=dispatch_locally) -> MixtureOfExperts:
    made = MixtureOfExperts(moe, D, dispatch, "cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(0, 0.3, generator=generator)
    return made.to(dtype)


def hidden(num_rows: int = 2, num_tokens: int = 12, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    x_BTD = torch.randn(num_rows, num_tokens, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return x_BTD.to(dtype).requires_grad_()


def by_loop(made: MixtureOfExperts, x_BTD: torch.Tensor, experts_NK: torch.Tensor) -> torch.Tensor:
    """The layer's definition, one choice at a time; a choice of no expert adds nothing."""
    x_ND = x_BTD.flatten(0, 1)
    weights_NK = made.router(x_ND).weights_NK
    gate, up, down = (getattr(made.experts, name).weight for name in ("gate_proj", "up_proj", "down_proj"))
    rows = []
    for n, x in enumerate(x_ND):
        y = torch.zeros_like(x)
        for k, e in enumerate(experts_NK[n].tolist()):
            if e < made.moe.num_experts:
                y = y + weights_NK[n, k] * (down[e] @ (F.silu(gate[e] @ x) * (up[e] @ x)))
        rows.append(y)
    return torch.stack(rows).view_as(x_BTD)


def assert_equal_with_gradients(made, actual, expected, x_BTD, tolerance):
    wanted = [x_BTD, *made.parameters()]
    direction = torch.randn(actual.shape, generator=torch.Generator().manual_seed(2), dtype=torch.float64).to(actual)
    ours = torch.autograd.grad(actual, wanted, direction)
    theirs = torch.autograd.grad(expected, wanted, direction)
    for a, b in zip((actual, *ours), (expected, *theirs), strict=True):
        assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
@pytest.mark.parametrize("num_experts", [2, 5, 40])
def test_a_layer_and_its_gradients_are_those_of_the_definition(num_experts, dtype, tolerance):
    made = layer(Moe(num_experts=num_experts, experts_per_token=2, expert_hidden_dim=24), dtype)
    x_BTD = hidden(dtype=dtype)
    y_BTD, routed = made(x_BTD)
    assert (routed.counts_E == 0).any() == (num_experts == 40)  # experts without a token are among them
    experts_NK = made.router(x_BTD.flatten(0, 1)).experts_NK
    assert_equal_with_gradients(made, y_BTD, by_loop(made, x_BTD, experts_NK), x_BTD, tolerance)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
def test_dropped_choices_add_nothing_and_get_no_gradient(dtype, tolerance):
    made = layer(Moe(num_experts=4, experts_per_token=2, expert_hidden_dim=24, capacity_factor=0.7), dtype)
    x_BTD = hidden(dtype=dtype)
    seen = []

    def watched(x_ND, experts_NK, num_experts, may_drop):
        seen.append(experts_NK)
        return dispatch_locally(x_ND, experts_NK, num_experts, may_drop)

    made.dispatch = watched
    y_BTD, routed = made(x_BTD)
    assert routed.num_dropped == (seen[0] == 4).sum() > 0
    assert routed.counts_E.sum() == 2 * 24
    assert_equal_with_gradients(made, y_BTD, by_loop(made, x_BTD, seen[0]), x_BTD, tolerance)


def test_rows_of_no_expert_may_hold_not_a_numbers():
    experts_NK = torch.tensor([[0, 2], [2, 1], [1, 0]])  # 2 is no expert
    plan = sort_by_expert(experts_NK, 2, True)
    x_ND = torch.randn(3, 4, requires_grad=True)
    weights_NK = torch.rand(3, 2, requires_grad=True)
    rows_RD = gather_rows(x_ND, plan)
    spoiled = torch.cat((rows_RD[:4], torch.full((2, 4), torch.nan)))
    y_ND = combine_rows(spoiled, weights_NK, plan)
    y_ND.sum().backward()
    assert y_ND.isfinite().all()
    assert x_ND.grad.isfinite().all()
    assert weights_NK.grad.isfinite().all()
    assert (weights_NK.grad[experts_NK == 2] == 0).all()
    spoiled_grad = torch.autograd.grad(gather_rows(x_ND, plan), x_ND, spoiled.detach())[0]
    assert spoiled_grad.isfinite().all()


@pytest.mark.parametrize("may_drop", [False, True])
def test_gather_and_combine_have_the_gradients_of_their_definition(may_drop):
    experts_NK = torch.tensor([[0, 3], [2, 1], [3, 0], [1, 2], [0, 1]])
    num_experts = 3 if may_drop else 4
    plan = sort_by_expert(experts_NK, num_experts, may_drop)
    assert plan.counts_E.tolist() == [3, 3, 2, 2][:num_experts]
    x_ND = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    weights_NK = torch.randn(5, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(
        lambda x, w: combine_rows(gather_rows(x, plan).square(), w, plan), (x_ND, weights_NK)
    )


@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 0, 8), (0, 0, 0), (2, 1, 3)])
@pytest.mark.parametrize("widths", [(16, 24), (6, 10)])
def test_the_grouped_product_is_that_of_the_loop(counts, widths):
    x_RD = torch.randn(8, widths[0], requires_grad=True)
    weight_EFD = torch.randn(3, widths[1], widths[0], requires_grad=True)
    counts_E, num_used = torch.tensor(counts), sum(counts)
    actual = grouped_linear(x_RD, weight_EFD, counts_E)[:num_used]
    expected = grouped_linear(x_RD.double(), weight_EFD.double(), counts_E)[:num_used]  # fp64 goes by the loop
    torch.testing.assert_close(actual.double(), expected, atol=1e-5, rtol=1e-5)
    direction = torch.randn(num_used, widths[1])
    ours = torch.autograd.grad(actual, (x_RD, weight_EFD), direction)
    theirs = torch.autograd.grad(expected, (x_RD, weight_EFD), direction.double())
    torch.testing.assert_close(ours[0][:num_used], theirs[0][:num_used], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours[1], theirs[1], atol=1e-5, rtol=1e-5)


def qwen2_block(made: MixtureOfExperts) -> Qwen2MoeSparseMoeBlock:
    """transformers' block with a shared expert behind a gate, with the weights of ours."""
    moe = made.moe
    config = Qwen2MoeConfig(
        hidden_size=D,
        num_experts=moe.num_experts,
        num_experts_per_tok=moe.experts_per_token,
        moe_intermediate_size=moe.expert_hidden_dim,
        shared_expert_intermediate_size=moe.num_shared_experts * moe.expert_hidden_dim,
        norm_topk_prob=moe.normalize_weights,
        experts_implementation="eager",
    )
    block = Qwen2MoeSparseMoeBlock(config)
    weights = dict(made.named_parameters())
    both = (weights["experts.gate_proj.weight"], weights["experts.up_proj.weight"])
    state = {
        "gate.weight": weights["router.weight"],
        "experts.gate_up_proj": torch.cat(both, 1),
        "experts.down_proj": weights["experts.down_proj.weight"],
        "shared_expert_gate.weight": weights["shared_gate.weight"],
    }
    state |= {f"shared_expert.{x}_proj.weight": weights[f"shared.{x}_proj.weight"] for x in ("gate", "up", "down")}
    block.load_state_dict(state)
    return block


GATED = Moe(num_experts=6, expert_hidden_dim=24, num_shared_experts=2, shared_expert_gate=True)


def shared_error(made: MixtureOfExperts) -> float:
    with torch.no_grad():
        expected = qwen2_block(made)(hidden())
        return float((made(hidden())[0] - expected).norm() / expected.norm())


def test_shared_experts_behind_a_gate_are_those_of_qwen2_moe():
    assert shared_error(layer(GATED)) < 5e-7


@pytest.mark.parametrize(
    "fault",
    [
        lambda made: setattr(made, "_shared", lambda x_ND: None),
        lambda made: setattr(made, "_shared", lambda x_ND: made.shared(x_ND)),
        lambda made: setattr(made, "dispatch", lambda x, e, n, d: dispatch_locally(x, (e + 1) % n, n, d)),
    ],
    ids=["shared experts dropped", "gate left out", "experts permuted"],
)
def test_the_comparison_catches_a_fault(fault):
    made = layer(GATED)
    fault(made)
    assert shared_error(made) > 1e-2


def test_ungated_shared_experts_are_added_as_they_are():
    made = layer(Moe(num_experts=4, expert_hidden_dim=8, num_shared_experts=1))
    y_BTD, _ = made(hidden())
    with_shared = y_BTD - made.shared(hidden())
    made.shared = None
    torch.testing.assert_close(with_shared, made(hidden())[0], atol=1e-5, rtol=1e-5)


def test_a_layer_reports_counts_entropy_and_no_drop():
    made = layer(Moe(num_experts=5, experts_per_token=2, expert_hidden_dim=8))
    _, routed = made(hidden())
    found = made.router(hidden().flatten(0, 1))
    assert routed.counts_E.tolist() == [int((found.experts_NK == e).sum()) for e in range(5)]
    entropy = torch.distributions.Categorical(probs=found.probability_NE).entropy().sum()
    torch.testing.assert_close(routed.entropy, entropy)
    assert routed.num_dropped == 0
    assert routed.aux_loss == 0
