"""Exact mode: every layout has the losses, gradient norms and weights of one rank, bit for bit."""

import pytest
from tests.train.runs import assert_same_bits, recipe, rows, steps, tensors, train_here

STEPS = 3
KEYS = (
    "numerics.mode=exact",
    "numerics.lanes=8",
    "data.global_batch=24",  # three micro-batches a lane: of two, either order gives the same sum
    "data.seq_len=32",
    "model.num_layers=4",
    f"run.steps={STEPS}",
    "checkpoint.asynchronous=false",
    "metrics.log_every=100",
)
BF16, TIED = "precision.compute=bf16", "model.tie_embeddings=true"
PLAIN, BOTH = (), (BF16, TIED, "model.vocab_size=2051")
MOE = ("model.moe.num_experts=4", "model.moe.expert_hidden_dim=64", "model.moe.balance=bias")

FEW = [
    (PLAIN, "layout=dp2"),
    (PLAIN, "layout=dp3"),
    (PLAIN, "layout=dp2.fsdp2"),
    (PLAIN, "layout=pp2 layout.pp_schedule=zb-h1"),
    (BOTH, "layout=fsdp2"),
    (BOTH, "layout=pp2"),
    (BOTH, "layout=dp2.pp2 layout.pp_schedule=zbv"),
]
SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "interleaved-zero-bubble", "zbv", "dualpipev")
PP4 = ("gpipe", "1f1b", "zb-h1")  # four layers are four stages
RECOMPUTED = ("full", "selective", "every_n")
WIDE = [
    "layout=dp2",
    "layout=dp3",
    "layout=dp4",
    "layout=dp5",
    "layout=dp8",
    "layout=fsdp2",
    "layout=fsdp2 layout.zero=1",
    "layout=fsdp2 layout.zero=2",
    "layout=fsdp4",
    "layout=fsdp8",
    "layout=dp2.fsdp2",
    "layout=dp2.fsdp4",
    *(f"layout=pp2 layout.pp_schedule={name}" for name in SCHEDULES),
    *(f"layout=pp4 layout.pp_schedule={name}" for name in PP4),
    *(f"layout=dp1 memory.activation_checkpointing={kind}" for kind in RECOMPUTED),
    *(f"layout=fsdp2 memory.activation_checkpointing={kind}" for kind in RECOMPUTED),
    "layout=fsdp2.pp2",
    "layout=dp2.pp2",
    "layout=dp2.fsdp2.pp2",
    "layout=fsdp2.pp2 layout.pp_schedule=zb-h1",
    "layout=dp2.pp2 layout.pp_schedule=zbv memory.activation_checkpointing=full",
    "layout=fsdp2.pp2 memory.activation_checkpointing=selective",
]


def outcome(run, *overrides):
    train_here(run, *KEYS, *overrides)
    return steps(run), [row["loss"] for row in rows(run, "validation")], tensors(run / f"checkpoints/step-{STEPS:08d}")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    found = {}

    def of(*overrides):
        if overrides not in found:
            found[overrides] = outcome(tmp_path_factory.mktemp("one"), *overrides)
        return found[overrides]

    return of


def assert_same_run(one, spread):
    assert spread[0] == one[0]
    assert spread[1] == one[1]
    assert_same_bits(spread[2], one[2])


@pytest.mark.parametrize(("model", "spread"), FEW, ids=lambda value: value if isinstance(value, str) else len(value))
def test_a_layout_has_the_bits_of_one_rank(model, spread, one_rank, tmp_path):
    assert_same_run(one_rank(*model), outcome(tmp_path, *model, *spread.split()))


@pytest.mark.slow
@pytest.mark.parametrize("spread", WIDE)
def test_every_layout_has_the_bits_of_one_rank(spread, one_rank, tmp_path):
    # FSDP cannot shard a weight of two stages of one rank.
    model = (BF16,) if "fsdp" in spread and "layout.pp_schedule=zbv" in spread else BOTH
    assert_same_run(one_rank(*model), outcome(tmp_path, *model, *spread.split()))


@pytest.mark.parametrize("spread", ["layout=dp2", "layout=fsdp2"])
def test_experts_that_are_not_spread_keep_their_bits(spread, one_rank, tmp_path):
    assert_same_run(one_rank(*MOE), outcome(tmp_path, *MOE, spread))


def test_the_default_mode_does_not(one_rank, tmp_path):
    default = ("numerics.mode=default", "layout=dp4", "optimizer.implementation=foreach")
    assert outcome(tmp_path, *default)[0] != one_rank()[0]


def test_lanes_change_bits_and_belong_to_the_run(one_rank, tmp_path):
    assert outcome(tmp_path, "numerics.lanes=2")[0] != one_rank()[0]
    from drumline.train.resume import AnotherRunError, require_same_run

    before = recipe(tmp_path, *KEYS).model_dump(mode="json")
    for key in ("numerics.lanes=4", "data.micro_batch=3", "numerics.mode=default", "run.threads=2"):
        with pytest.raises(AnotherRunError, match=key.split("=")[0]):
            require_same_run(before, recipe(tmp_path, *KEYS, key), "it")
    require_same_run(before, recipe(tmp_path, *KEYS, "layout=dp3"), "it")
