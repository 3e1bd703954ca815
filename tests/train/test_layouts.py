"""Every layout trains the same run: the same global batches, losses equal to rounding."""

import pytest
from tests.train.runs import rows, train, train_here

KEYS = ("run.steps=6", "checkpoint.at_end=false")


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    run = tmp_path_factory.mktemp("one")
    train_here(run, *KEYS)
    return rows(run, "step"), rows(run, "validation")


@pytest.mark.parametrize(
    "overrides",
    [
        ("layout=dp2",),
        ("layout=fsdp2", "layout.zero=1"),
        ("layout=fsdp2", "layout.zero=2"),
        ("layout=fsdp2", "layout.zero=3"),
        ("layout=dp2.fsdp2",),
        ("layout=dp4",),
        ("layout=fsdp4",),
        ("layout=cp2",),
        ("layout=cp2", "layout.cp_method=gather"),
        ("layout=cp2", "layout.cp_method=ulysses"),
        ("layout=cp4", "layout.cp_method=ring_ulysses", "layout.cp_ulysses=2"),
        ("layout=dp2.cp2",),
        ("layout=fsdp2.cp2", "layout.zero=1"),
        ("layout=fsdp2.cp2", "memory.activation_checkpointing=full"),
        ("layout=pp2",),
        ("layout=pp2.dp2", "layout.pp_schedule=zb-h1"),
        ("layout=pp2.fsdp2", "memory.activation_checkpointing=selective"),
        ("layout=pp2.fsdp2", "layout.pp_schedule=zb-h1", "layout.zero=2"),
        ("layout=pp2.cp2",),
        ("layout=pp2", "layout.pp_schedule=gpipe", "data.micro_batch=4", "memory.activation_checkpointing=full"),
        ("layout=pp2", "layout.pp_schedule=zb-h1", "memory.activation_checkpointing=full"),
        ("layout=tp2",),
        ("layout=tp2", "layout.sequence_parallel=false"),
        ("layout=tp2", "memory.activation_checkpointing=full"),
        ("layout=tp2", "memory.activation_checkpointing=selective"),
        ("layout=tp2", "layout.tp_async=true"),
        ("layout=dp2.tp2",),
        ("layout=fsdp2.tp2",),
        ("layout=fsdp2.tp2", "layout.zero=1", "layout.sequence_parallel=false"),
        ("layout=cp2.tp2",),
        ("layout=cp2.tp2", "layout.cp_method=ulysses"),
        ("layout=dp2.fsdp2.tp2",),
        ("layout=pp2.tp2",),
        ("layout=pp2.tp2", "layout.sequence_parallel=false", "layout.pp_schedule=zb-h1"),
        ("data.micro_batch=4",),
        ("data.num_workers=0",),
        ("memory.activation_checkpointing=full",),
        ("memory.activation_checkpointing=selective", "layout=fsdp2"),
        ("memory.activation_checkpointing=every_n", "layout=dp2"),
        ("model.attention=sdpa",),
        ("optimizer.implementation=fused",),
    ],
    ids=" ".join,
)
def test_losses_are_those_of_one_rank(overrides, one_rank, tmp_path):
    train_here(tmp_path, *KEYS, *overrides)
    steps, validations = one_rank
    found = rows(tmp_path, "step")
    assert [row["num_tokens"] for row in found] == [row["num_tokens"] for row in steps]
    for kind, expected in (("step", steps), ("validation", validations)):
        for a, b in zip(rows(tmp_path, kind), expected, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
    assert [row["grad_norm"] for row in found] == pytest.approx([row["grad_norm"] for row in steps], rel=1e-3)


@pytest.mark.parametrize("vocabulary", [2049, 2051])
def test_a_vocabulary_that_does_not_divide_trains_as_on_one_rank(vocabulary, tmp_path):
    keys = (*KEYS, "run.steps=3", f"model.vocab_size={vocabulary}", "model.tie_embeddings=true")
    one, spread = tmp_path / "one", tmp_path / "spread"
    train_here(one, *keys)
    train_here(spread, *keys, "layout=fsdp2.tp2")
    losses, expected = ([row["loss"] for row in rows(run, "step")] for run in (spread, one))
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("layout", ["dp1", "dp2", "fsdp2", "pp2", "pp2.fsdp2", "tp2", "fsdp2.tp2"])
def test_bf16_trains_close_to_fp32(layout, one_rank, tmp_path):
    train_here(tmp_path, *KEYS, "precision.compute=bf16", f"layout={layout}")
    losses = [row["loss"] for row in rows(tmp_path, "step")]
    assert losses == pytest.approx([row["loss"] for row in one_rank[0]], rel=5e-3)
    assert losses != [row["loss"] for row in one_rank[0]]


@pytest.mark.slow
def test_compiled_blocks_train_the_same_run(one_rank, tmp_path):
    # As a process of its own: inductor's workers do not survive a fork of a parent that has used them.
    result = train(tmp_path, *KEYS, "run.compile=true", timeout_s=280)
    assert result.returncode == 0, result.stderr
    losses = [row["loss"] for row in rows(tmp_path, "step")]
    assert losses == pytest.approx([row["loss"] for row in one_rank[0]], rel=1e-5)
