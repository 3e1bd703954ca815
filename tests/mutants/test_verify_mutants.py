"""`verify` turns red for each fault, and the first tensor that it names is where the fault is."""

import re

import pytest
from tests.mutants import faults
from tests.parallel.context import test_context_mutants as context
from tests.parallel.expert import test_expert_mutants as expert
from tests.parallel.pipeline import test_mutants as pipeline
from tests.parallel.tensor import test_tensor_mutants as tensor

from drumline.verify import References, verify
from drumline.verify.matrix import case_of, select

LAST_GRADIENT = r"1/gradient/output\.weight"
ATTENTION = r"1/forward/layers\.0\.attention"

MUTANTS = [
    # A reduction that is missing, doubled or a mean.
    (faults.gradients_are_not_summed, "dense/dp2", LAST_GRADIENT),
    (faults.gradients_are_averaged, "dense/cp2", LAST_GRADIENT),
    (faults.gradients_are_summed_twice, "dense/dp2.cp2", LAST_GRADIENT),
    # Loss, norm, optimizer, first weights.
    (faults.loss_is_a_mean_of_means, "dense/dp1", "1/loss/"),
    (faults.every_replica_counts_in_the_norm, "dense/dp2", "1/norm/"),
    (faults.gradients_are_not_clipped, "dense/fsdp2", r"1/weight/output\.weight"),
    (faults.second_moment_decays_like_the_first, "dense/dp2", r"2/weight/output\.weight"),
    (faults.one_replica_drifts, "dense/dp2", r"1/weight/norm\.weight"),
    (faults.shards_are_all_filled_as_the_first, "dense/fsdp2", r"0/init/embedding\.weight"),
    (faults.blocks_recompute_something_else, "dense/dp1 full", r"1/gradient/layers\.3\."),
    # Context parallelism.
    (faults.labels_at_borders_are_dropped, "dense/cp2", "1/loss/"),
    (context.positions_start_at_zero, "dense/cp2", ATTENTION),
    (context.document_mask_shows_one_token_too_many, "dense/cp4", ATTENTION),
    (context.gradient_of_keys_misses_the_last_hop, "dense/cp4", r"1/gradient/layers\.3\.attention\.[kv]_proj"),
    # Tensor and sequence parallelism.
    (tensor.gradients_of_norms_are_not_summed, "dense/tp2", r"1/gradient/layers\.3\.mlp_norm"),
    (tensor.backward_of_entering_does_not_sum, "dense/tp2 no-sp", r"1/gradient/norm\.weight"),
    (tensor.vocabulary_is_off_by_one, "dense/tp2", "1/forward/embedding"),
    (tensor.sums_of_chunks_are_not_passed_on, "dense/tp2 async", ATTENTION),
    # Expert parallelism.
    (expert.experts_gradient_is_not_summed_over_efsdp, "moe/fsdp4.ep2", r"1/gradient/layers\.1\.mlp\.experts"),
    (expert.router_misses_the_term_through_the_weights, "moe/fsdp2.ep2", r"1/gradient/layers\.1\.mlp\.router"),
    (expert.rows_go_back_in_the_order_of_the_experts, "moe/fsdp2.ep2", r"1/forward/layers\.0\.mlp"),
    (expert.aux_loss_is_counted_on_every_rank_of_the_group, "moe/dp2", r"2/gradient/layers\.1\.mlp\.router"),
    # Pipelines.
    (pipeline.stages_in_wrong_order, "dense/pp2", ATTENTION),
    (pipeline.tied_gradient_is_not_summed, "tied/pp2", r"1/gradient/embedding\.weight"),
]

FURTHER = [
    (faults.gradients_are_not_summed, "dense/cp2", LAST_GRADIENT),
    (faults.gradients_are_averaged, "dense/dp4", LAST_GRADIENT),
    (faults.norms_decay, "dense/fsdp2 zero1", r"1/weight/norm\.weight"),
    (context.positions_shifted_by_the_rank_s_offset, "causal/cp4 gather", ATTENTION),
    (context.key_heads_repeat_in_the_wrong_order, "qwen/cp4 ulysses", ATTENTION),
    (tensor.gradients_of_norms_are_summed_though_whole, "dense/tp2 no-sp", r"1/gradient/layers\.3\.mlp_norm"),
    (tensor.gradients_of_query_norms_are_not_summed, "qwen/tp2 no-sp", r"1/gradient/layers\.3\.attention\.q_norm"),
    (tensor.every_rank_counts_the_loss, "dense/tp2", LAST_GRADIENT),
    (tensor.padding_counts_in_the_loss, "uneven/tp2", "1/loss/"),
    (tensor.key_heads_of_ranks_are_swapped, "dense/tp2", ATTENTION),
    (tensor.weights_of_experts_do_not_enter, "moe/tp2 no-sp", r"1/gradient/layers\.1\.mlp\.router"),
    (tensor.chunks_come_the_other_way_round, "dense/tp2 async", ATTENTION),
    (expert.experts_gradient_is_scaled_by_ep, "moe/fsdp4.ep2", r"1/gradient/layers\.1\.mlp\.experts"),
    (pipeline.norm_misses_a_stage, "dense/pp2", "1/norm/"),
    (pipeline.only_the_last_micro_batch_is_kept, "dense/pp2", LAST_GRADIENT),
    (pipeline.gradients_reach_the_wrong_micro_batch, "dense/pp2", r"1/gradient/layers\.1\.mlp\.down_proj"),
]
"""Of the same kind as one above: part of the long matrix."""

TAKE_MONKEYPATCH = (faults, pipeline)
"""Modules whose faults are given the fixture; those of the others its `setattr`."""


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    return References(tmp_path_factory.mktemp("references"))


def verdict(row, references):
    (row,) = [found for found in select(row) if found.name == row]
    (result,) = verify([case_of(row)], max_ranks=4, references=references)
    assert result.verdict is not None, result.failure
    return result.verdict


def telling_and_further():
    return [
        pytest.param(*mutant, id=f"{mutant[0].__name__}-{mutant[1].replace('/', '-').replace(' ', '-')}", marks=marks)
        for mutants, marks in ((MUTANTS, ()), (FURTHER, pytest.mark.slow))
        for mutant in mutants
    ]


def rows():
    telling, all_rows = ({row for _, row, _ in mutants} for mutants in (MUTANTS, MUTANTS + FURTHER))
    return [pytest.param(row, marks=() if row in telling else pytest.mark.slow) for row in sorted(all_rows)]


@pytest.mark.parametrize(("fault", "row", "place"), telling_and_further())
def test_a_fault_turns_it_red_and_is_found_where_it_is(fault, row, place, references, monkeypatch):
    (named,) = [found for found in select(row) if found.name == row]
    references.get(case_of(named).recipe)  # before the fault
    takes_fixture = fault.__module__ in {module.__name__ for module in TAKE_MONKEYPATCH}
    fault(monkeypatch if takes_fixture else monkeypatch.setattr)
    found = verdict(row, references)
    assert not found.ok
    assert re.match(place, found.first_wrong), (found.first_wrong, found.why)


@pytest.mark.parametrize("row", rows())
def test_without_a_fault_it_is_green(row, references):
    found = verdict(row, references)
    assert found.ok, (found.first_wrong, found.why)
