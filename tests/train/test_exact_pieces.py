"""Exact mode with blocks: every layout that shares out products has the bits of one rank."""

import pytest
from tests.train.test_exact_layouts import assert_same_run, one_rank, outcome  # noqa: F401

BF16 = "precision.compute=bf16"
DENSE = ("numerics.blocks=4", "model.num_layers=2", "model.num_kv_heads=4", "data.global_batch=16", "data.seq_len=64")
EXPERTS = (
    *DENSE,
    "model.moe.num_experts=8",
    "model.moe.expert_hidden_dim=64",
    "model.moe.num_dense_layers=1",
    "model.moe.num_shared_experts=1",
    "model.moe.balance=bias",
)
TIED = (*DENSE, BF16, "model.tie_embeddings=true", "model.vocab_size=2051")

FEW = [
    (DENSE, "layout=tp2"),
    (TIED, "layout=fsdp2.tp2"),
    (TIED, "layout=tp2.pp2"),
    (DENSE, "layout=cp2"),
    (EXPERTS, "layout=fsdp2.ep2.tp2"),
]
WIDE = [
    "layout=tp2 layout.sequence_parallel=false",
    "layout=tp4",
    "layout=dp2.fsdp2.tp2",
    "layout=dp2.tp2.pp2",
    "layout=tp2.pp2 layout.pp_schedule=zb-h1",
    "layout=tp2 memory.activation_checkpointing=full",
    "layout=cp2 layout.cp_method=ulysses",
    "layout=cp4",
    "layout=cp4 layout.cp_method=ring_ulysses layout.cp_ulysses=2",
    "layout=cp2.tp2",
    "layout=dp2.cp2.tp2",
    "layout=fsdp2.cp2.tp2",
    "layout=fsdp2.pp2.tp2",
]
SPREAD_EXPERTS = [
    "layout=fsdp2.ep2",
    "layout=fsdp4.ep4",
    "layout=cp2.ep2",
    "layout=fsdp2.cp2.ep4",
    "layout=dp2.cp2.ep2",
    "layout=fsdp2.ep2.pp2",
    "layout=tp2 layout.sequence_parallel=false",
    "layout=dp2.cp2",
]


@pytest.mark.parametrize(("model", "spread"), FEW, ids=lambda value: value if isinstance(value, str) else len(value))
def test_a_layout_has_the_bits_of_one_rank(model, spread, one_rank, tmp_path):  # noqa: F811
    assert_same_run(one_rank(*model), outcome(tmp_path, *model, *spread.split()))


@pytest.mark.slow
@pytest.mark.parametrize("spread", WIDE)
def test_every_layout_has_the_bits_of_one_rank(spread, one_rank, tmp_path):  # noqa: F811
    assert_same_run(one_rank(*TIED), outcome(tmp_path, *TIED, *spread.split()))


@pytest.mark.slow
@pytest.mark.parametrize("spread", SPREAD_EXPERTS)
def test_experts_have_the_bits_of_one_rank(spread, one_rank, tmp_path):  # noqa: F811
    model = (*EXPERTS, BF16)
    assert_same_run(one_rank(*model), outcome(tmp_path, *model, *spread.split()))


def test_whole_products_do_not(one_rank, tmp_path):  # noqa: F811
    default = (*DENSE, "numerics.mode=default", "numerics.blocks=1", "layout=tp2")
    assert outcome(tmp_path, *default)[0] != one_rank(*DENSE)[0]
