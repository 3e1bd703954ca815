"""Who is chosen and with which weight: against transformers' DeepSeek-V3 router, and definitions in plain loops."""

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter

from drumline.models.moe import Router, choose, within_capacity
from drumline.recipe.sections import Moe

N, D = 60, 16


def router(moe: Moe, seed: int = 0) -> Router:
    made = Router(moe, D, "cpu")
    generator = torch.Generator().manual_seed(seed)
    torch.nn.init.normal_(made.weight, std=0.3, generator=generator)
    if made.bias is not None:
        made.bias.uniform_(-0.2, 0.2, generator=generator)
    return made


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randn(N, D, generator=torch.Generator().manual_seed(seed))


def as_matrix(experts_NK: torch.Tensor, weights_NK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Weight of every expert for every token, 0 where it is not chosen: the order of choices does not matter."""
    return torch.zeros(len(experts_NK), num_experts).scatter_(1, experts_NK, weights_NK.detach())


@pytest.mark.parametrize(
    ("groups", "per_token", "normalize", "scaling"), [(1, 1, True, 1.0), (4, 2, True, 2.5), (4, 1, False, 1.0)]
)
def test_sigmoid_with_bias_and_groups_is_that_of_deepseek_v3(groups, per_token, normalize, scaling):
    moe = Moe(
        num_experts=16,
        experts_per_token=3,
        scoring="sigmoid",
        balance="bias",
        num_expert_groups=groups,
        groups_per_token=per_token,
        normalize_weights=normalize,
        routed_scaling=scaling,
    )
    ours = router(moe)
    config = DeepseekV3Config(
        hidden_size=D,
        moe_intermediate_size=8,
        n_routed_experts=16,
        num_experts_per_tok=3,
        n_shared_experts=1,
        n_group=groups,
        topk_group=per_token,
        norm_topk_prob=normalize,
        routed_scaling_factor=scaling,
    )
    theirs = DeepseekV3TopkRouter(config)
    with torch.no_grad():
        theirs.weight.copy_(ours.weight)
        theirs.e_score_correction_bias.copy_(ours.bias)
        found = ours(tokens())
        _, weights_NK, experts_NK = theirs(tokens())
    torch.testing.assert_close(as_matrix(found.experts_NK, found.weights_NK, 16), as_matrix(experts_NK, weights_NK, 16))


def test_the_bias_changes_the_choice_and_never_the_weights():
    moe = Moe(num_experts=6, experts_per_token=2, scoring="sigmoid", balance="bias", normalize_weights=False)
    made = router(moe)
    made.bias.zero_()
    made.bias[4] = 100.0
    found = made(tokens())
    assert (found.experts_NK == 4).any(1).all()
    scores_NE = torch.sigmoid(tokens() @ made.weight.T)
    torch.testing.assert_close(found.weights_NK, scores_NE.gather(1, found.experts_NK))


def test_softmax_groups_are_judged_by_their_best_expert():
    moe = Moe(num_experts=6, experts_per_token=2, num_expert_groups=3, groups_per_token=1)
    scores = torch.tensor([[0.30, 0.01, 0.29, 0.28, 0.05, 0.07]])
    experts, _ = choose(scores, moe, None)
    assert sorted(experts[0].tolist()) == [0, 1]  # the pair (2, 3) has the larger sum


def test_a_negative_score_in_a_chosen_group_comes_before_any_outside():
    moe = Moe(num_experts=4, experts_per_token=2, num_expert_groups=2, scoring="sigmoid", balance="bias")
    scores = torch.tensor([[0.9, 0.1, 0.5, 0.4]])
    experts, _ = choose(scores, moe, torch.tensor([0.0, -0.3, -0.5, -0.6]))
    assert sorted(experts[0].tolist()) == [0, 1]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_normalized_weights_sum_to_the_scaling_and_probabilities_to_one(scoring):
    found = router(Moe(num_experts=8, experts_per_token=3, scoring=scoring, routed_scaling=1.5))(tokens())
    torch.testing.assert_close(found.weights_NK.sum(1), torch.full((N,), 1.5))
    torch.testing.assert_close(found.probability_NE.sum(1), torch.ones(N))


def test_scores_of_bf16_tokens_are_fp32():
    found = router(Moe(num_experts=8))(tokens().bfloat16())
    assert found.weights_NK.dtype == found.probability_NE.dtype == torch.float32


def dropped_by_definition(experts_NK, num_tokens, num_experts, capacity):
    kept = experts_NK.clone()
    for first in range(0, len(kept), num_tokens):
        taken = [0] * num_experts
        for n in range(first, first + num_tokens):
            for k, expert in enumerate(experts_NK[n].tolist()):
                taken[expert] += 1
                if taken[expert] > capacity:
                    kept[n, k] = num_experts
    return kept


@pytest.mark.parametrize(("factor", "capacity"), [(0.1, 1), (0.5, 4), (1.0, 8), (1.3, 11), (100.0, 800)])
def test_an_expert_takes_the_earliest_choices_of_each_sequence_up_to_its_capacity(factor, capacity):
    experts_NK = torch.rand(40, 6, generator=torch.Generator().manual_seed(3)).pow(2).topk(2).indices
    experts_NK[20:30] = torch.tensor([2, 5])
    kept = within_capacity(experts_NK, 20, 6, factor * 6 / 5)  # 20 tokens of 2 choices over 5 fifths: 8 each
    expected = dropped_by_definition(experts_NK, 20, 6, capacity)
    assert torch.equal(kept, expected)
    assert (kept == 6).any() == (factor < 2)


def test_what_is_dropped_depends_neither_on_other_sequences_nor_on_later_tokens():
    experts_NK = torch.randint(4, (32, 2), generator=torch.Generator().manual_seed(0))
    alone = within_capacity(experts_NK[16:], 16, 4, 0.5)
    assert torch.equal(within_capacity(experts_NK, 16, 4, 0.5)[16:], alone)
    changed = experts_NK[16:].clone()
    changed[9:] = 3 - changed[9:]
    assert torch.equal(within_capacity(changed, 16, 4, 0.5)[:9], alone[:9])
