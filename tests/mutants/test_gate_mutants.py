"""The numerics gate turns red for each fault, and the first tensor that it names is where the fault is; it stays green
for what is legitimate.
"""

import re

import pytest
from tests.mutants import faults, numeric_faults
from tests.mutants.gated import judged
from tests.parallel.context import test_context_mutants as context
from tests.parallel.pipeline import test_mutants as pipeline
from tests.parallel.tensor import test_tensor_mutants as tensor

LAST_GRADIENT = r"1/gradient/output\.weight"
ATTENTION = r"1/forward/layers\.0\.attention$"
AC = "memory.activation_checkpointing=full"
SDPA = "model.attention=sdpa"
NO_SP = ("layout=tp2", "layout.sequence_parallel=false")

MUTANTS = [
    # Precision and single numbers.
    (numeric_faults.softmax_is_in_bf16, (SDPA,), ATTENTION),
    (numeric_faults.gradients_accumulate_in_bf16, ("layout=dp1",), LAST_GRADIENT),
    (numeric_faults.rotary_tables_are_in_bf16, ("layout=dp1",), ATTENTION),
    (numeric_faults.epsilon_of_norms_is_tenfold, ("layout=dp1",), r"1/forward/layers\.0\.attention_norm"),
    (numeric_faults.epsilon_of_the_optimizer_is_tenfold, ("layout=dp1",), r"1/weight/output\.weight"),
    (numeric_faults.loss_of_one_replica_is_off_by_a_part_in_2_to_the_18, ("layout=dp2",), "1/loss/"),
    (numeric_faults.a_weight_changes_its_sign, ("layout=dp1",), r"1/weight/layers\.1\.mlp\.down_proj"),
    (numeric_faults.a_bit_of_one_replica_flips, ("layout=dp2",), r"1/weight/layers\.0\.mlp_norm"),
    (numeric_faults.residual_stream_is_rounded, ("layout=dp1",), r"1/forward/layers\.0$"),
    (numeric_faults.logits_are_rounded, ("layout=dp1",), "1/loss/"),
    (numeric_faults.second_moment_is_kept_in_bf16, ("layout=dp1",), r"1/optimizer/output\.weight\.exp_avg_sq"),
    # Sums over ranks, loss, norm, optimizer, recomputation.
    (faults.gradients_are_not_summed, ("layout=dp2",), LAST_GRADIENT),
    (faults.gradients_are_averaged, ("layout=dp2",), LAST_GRADIENT),
    (faults.gradients_are_summed_twice, ("layout=dp2",), LAST_GRADIENT),
    (faults.loss_is_a_mean_of_means, ("layout=dp1",), "1/loss/"),
    (faults.every_replica_counts_in_the_norm, ("layout=dp2",), "1/norm/"),
    (faults.gradients_are_not_clipped, ("layout=fsdp2",), r"1/optimizer/output\.weight"),
    (faults.second_moment_decays_like_the_first, ("layout=dp1",), r"1/optimizer/output\.weight\.exp_avg_sq"),
    (faults.norms_decay, ("layout=dp1",), r"1/weight/norm\.weight"),
    (faults.one_replica_drifts, ("layout=dp2",), r"1/weight/norm\.weight"),
    (faults.shards_are_all_filled_as_the_first, ("layout=fsdp2",), r"0/init/embedding\.weight"),
    (faults.blocks_recompute_something_else, (AC,), r"1/recompute/layers\.0\.attention_norm"),
    # Ways to split the work.
    (faults.labels_at_borders_are_dropped, ("layout=cp2",), "1/loss/"),
    (context.positions_start_at_zero, ("layout=cp2",), ATTENTION),
    (context.document_mask_shows_one_token_too_many, ("layout=cp2",), ATTENTION),
    (tensor.gradients_of_norms_are_not_summed, ("layout=tp2",), r"1/gradient/layers\.1\.mlp_norm"),
    (tensor.backward_of_entering_does_not_sum, NO_SP, r"1/backward/norm"),
    (tensor.vocabulary_is_off_by_one, ("layout=tp2",), "1/forward/embedding"),
    (pipeline.stages_in_wrong_order, ("layout=pp2",), r"1/forward/layers\.0\.attention_norm"),
    (pipeline.norm_misses_a_stage, ("layout=pp2",), "1/norm/"),
    (pipeline.only_the_last_micro_batch_is_kept, ("layout=pp2",), LAST_GRADIENT),
]

LEGITIMATE = [
    ("layout=dp1",),
    ("data.micro_batch=4",),
    (SDPA, "data.micro_batch=2"),
    ("memory.activation_checkpointing=selective",),
    ("memory.loss_chunk_tokens=7",),
    ("optimizer.implementation=foreach",),
    ("run.threads=2",),
    ("layout=dp4",),
    ("layout=fsdp2", "layout.zero=1"),
    ("layout=tp2", AC),
    (*NO_SP, "precision.compute=bf16"),
    ("layout=cp2", "layout.cp_method=gather"),
    ("layout=pp2", "precision.compute=bf16"),
    ("layout=fsdp2.tp2",),
]
FURTHER = [
    ("layout=cp2.tp2",),
    ("layout=dp2.pp2",),
    ("layout=dp2.fsdp2", "precision.compute=bf16"),
    ("layout=cp2", "precision.compute=bf16"),
    ("layout=fsdp2.tp2", "precision.compute=bf16"),
]


@pytest.mark.parametrize(("fault", "overrides", "place"), MUTANTS, ids=[fault.__name__ for fault, _, _ in MUTANTS])
def test_a_fault_turns_it_red_and_is_found_where_it_is(fault, overrides, place, tmp_path, monkeypatch):
    takes_fixture = fault.__module__.rsplit(".", 1)[1] in ("faults", "numeric_faults", "test_mutants")
    fault(monkeypatch if takes_fixture else monkeypatch.setattr)
    found = judged(tmp_path / "c", overrides)
    assert not found.passes
    assert re.match(place, found.failed[0].key), [(check.key, check.why) for check in found.failed[:3]]


@pytest.mark.parametrize("overrides", [*LEGITIMATE, *(pytest.param(each, marks=pytest.mark.slow) for each in FURTHER)])
def test_what_is_legitimate_passes(overrides, tmp_path):
    found = judged(tmp_path / "c", overrides)
    assert found.passes, [(check.key, check.why) for check in found.failed[:3]]
    tiers = {check.tier for check in found.checks}
    assert tiers == {"B" if "precision.compute=bf16" in overrides else "A", "C", "D"}


def test_there_are_enough_of_both():
    assert len(MUTANTS) >= 20
    assert len(LEGITIMATE) >= 10
