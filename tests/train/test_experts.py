"""Runs with experts: every data-parallel layout trains the same run, a resumed run is bit for bit the one that was not,
and what the routers did is in metrics.jsonl."""

import pytest
import torch
from tests.train.runs import rows, steps, tensors, train_here

from drumline.models.moe import Router
from drumline.train.routing import RoutingTally
from drumline.train.trackers import scalars

EXPERTS = (
    "model.family=qwen3",
    "model.qk_norm=true",
    "model.moe.num_experts=8",
    "model.moe.experts_per_token=2",
    "model.moe.expert_hidden_dim=64",
    "model.moe.num_dense_layers=1",
    "model.num_layers=3",
    "checkpoint.at_end=false",
)
KINDS = {
    "aux_loss": ("model.moe.balance=aux_loss", "model.moe.aux_loss_coefficient=0.1"),
    "bias": (
        "model.moe.balance=bias",
        "model.moe.scoring=sigmoid",
        "model.moe.bias_update_speed=0.02",
        "model.moe.num_shared_experts=1",
        "model.moe.num_expert_groups=4",
        "model.moe.groups_per_token=2",
    ),
    "capacity": ("model.moe.capacity_factor=1.0",),
}


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    found = {}
    for kind, keys in KINDS.items():
        run = tmp_path_factory.mktemp(kind)
        train_here(run, *EXPERTS, *keys, "run.steps=6")
        found[kind] = rows(run, "step"), rows(run, "validation")
    return found


def assert_same_run(found, expected):
    assert [row["loss"] for row in found] == pytest.approx([row["loss"] for row in expected], rel=1e-5)
    assert [row["grad_norm"] for row in found] == pytest.approx([row["grad_norm"] for row in expected], rel=1e-3)
    for row, other in zip(found, expected, strict=True):
        assert row["router"].keys() == other["router"].keys()
        # Rounding may move a token that is as near to one expert, or group of them, as to another.
        moved = (torch.tensor(row["router"]["load"]) - torch.tensor(other["router"]["load"])).abs().sum()
        assert moved <= 24  # of 8,192 places
        assert row["router"]["entropy"] == pytest.approx(other["router"]["entropy"], rel=1e-5)
        assert row["router"]["dropped"] == pytest.approx(other["router"]["dropped"], abs=2e-3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "overrides",
    [
        ("layout=dp2",),
        ("layout=fsdp2",),
        ("layout=dp2.fsdp2",),
        ("layout=cp2",),
        ("layout=pp2",),
        ("layout=pp2.dp2", "layout.pp_schedule=zb-h1"),
        ("layout=tp2",),
        ("layout=tp2", "layout.tp_async=true"),
        ("layout=tp2", "layout.sequence_parallel=false"),
        ("layout=dp2.tp2", "layout.sequence_parallel=false"),
        ("layout=fsdp2.tp2",),
        ("layout=cp2.tp2", "memory.activation_checkpointing=full"),
        ("data.micro_batch=4",),
        ("layout=fsdp2", "memory.activation_checkpointing=full"),
    ],
    ids=" ".join,
)
def test_losses_and_loads_are_those_of_one_rank(overrides, kind, one_rank, tmp_path):
    cuts = "cp2" in overrides[0] or ("tp2" in overrides[0] and "layout.sequence_parallel=false" not in overrides)
    if kind == "capacity" and cuts:
        pytest.skip("a sequence is not whole on a rank: refused by moe-capacity-cp and moe-capacity-tp")
    train_here(tmp_path, *EXPERTS, *KINDS[kind], "run.steps=6", *overrides)
    assert_same_run(rows(tmp_path, "step"), one_rank[kind][0])
    losses = [[row["loss"] for row in found] for found in (rows(tmp_path, "validation"), one_rank[kind][1])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("kind", ["aux_loss", "bias"])
def test_the_comparison_catches_counts_of_each_rank_alone(kind, one_rank, tmp_path, monkeypatch):
    right = RoutingTally.__init__
    monkeypatch.setattr(
        RoutingTally, "__init__", lambda self, model, _, **options: right(self, model, lambda counts, dtype: counts)
    )
    train_here(tmp_path, *EXPERTS, *KINDS[kind], "run.steps=6", "layout=dp2")
    with pytest.raises(AssertionError):
        assert_same_run(rows(tmp_path, "step"), one_rank[kind][0])


def test_the_comparison_catches_tokens_that_every_tensor_parallel_rank_counts(one_rank, tmp_path, monkeypatch):
    right = RoutingTally.__init__
    monkeypatch.setattr(RoutingTally, "__init__", lambda self, model, total, counts: right(self, model, total))
    train_here(tmp_path, *EXPERTS, *KINDS["bias"], "run.steps=6", "layout=tp2", "layout.sequence_parallel=false")
    with pytest.raises(AssertionError):
        assert_same_run(rows(tmp_path, "step"), one_rank["bias"][0])


def test_the_comparison_catches_a_balance_that_is_not_moved(one_rank, tmp_path, monkeypatch):
    monkeypatch.setattr(Router, "update", lambda self, counts_E: None)
    train_here(tmp_path, *EXPERTS, *KINDS["bias"], "run.steps=6")
    with pytest.raises(AssertionError):
        assert_same_run(rows(tmp_path, "step"), one_rank["bias"][0])


@pytest.mark.parametrize("kind", ["aux_loss", "bias"])
@pytest.mark.parametrize("layout", ["dp1", "dp2", "fsdp2", "tp2"])
def test_a_killed_run_resumes_bit_for_bit(kind, layout, tmp_path):
    through, killed = tmp_path / "through", tmp_path / "killed"
    keys = (*EXPERTS, *KINDS[kind], "checkpoint.at_end=true", "run.steps=9", "checkpoint.every=3", f"layout={layout}")
    train_here(through, *keys)
    train_here(killed, *keys, kill_after=5)
    train_here(killed, *keys)
    assert rows(killed, "start")[-1]["step"] == 3
    assert steps(killed) == steps(through)
    routers = [[row["router"] for row in rows(run, "step")] for run in (killed, through)]
    assert routers[0] == routers[1]
    a, b = (tensors(run / "checkpoints" / "step-00000009") for run in (killed, through))
    assert f"model.layers.2.mlp.router.{'load' if kind == 'aux_loss' else 'bias'}" in a
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_goes_on_under_another_layout(one_rank, tmp_path):
    keys = (*EXPERTS, *KINDS["bias"], "checkpoint.every=3")
    train_here(tmp_path, *keys, "run.steps=6", "layout=fsdp2", kill_after=4)
    train_here(tmp_path, *keys, "run.steps=6", "layout=dp2")
    assert [row["layout"] for row in rows(tmp_path, "start")] == ["fsdp2", "dp2"]
    assert_same_run(rows(tmp_path, "step"), one_rank["bias"][0])


def test_metrics_have_load_entropy_and_dropped_of_every_layer(one_rank):
    for kind, (found, _) in one_rank.items():
        for row in found:
            router = row["router"]
            assert router["layers"] == [1, 2]
            load = torch.tensor(router["load"])
            assert load.shape == (2, 8)
            assert (load.sum(1) == 2 * 8 * 128).all()  # two choices of each token of the global batch
            assert router["load_max"] == (load.amax(1) / 256).tolist()
            assert router["load_min"] == (load.amin(1) / 256).tolist()
            assert all(0 < entropy <= 2.0795 for entropy in router["entropy"])  # at most log 8
            assert all((dropped > 0) == (kind == "capacity") for dropped in router["dropped"])


def test_the_load_of_every_expert_is_written_on_the_steps_that_are_asked_for(tmp_path):
    train_here(tmp_path, *EXPERTS, "run.steps=5", "metrics.expert_load_every=2", "run.validation_batches=0")
    assert [row["step"] for row in rows(tmp_path, "step") if "load" in row["router"]] == [2, 4]
    assert all("load_max" in row["router"] for row in rows(tmp_path, "step"))


def test_a_dense_run_has_no_router_in_its_rows(tmp_path):
    train_here(tmp_path, "run.steps=1", "checkpoint.at_end=false")
    assert "router" not in rows(tmp_path, "step")[0]


def test_bf16_trains_close_to_fp32(one_rank, tmp_path):
    train_here(tmp_path, *EXPERTS, *KINDS["aux_loss"], "run.steps=6", "precision.compute=bf16", "layout=fsdp2")
    losses = [row["loss"] for row in rows(tmp_path, "step")]
    assert losses == pytest.approx([row["loss"] for row in one_rank["aux_loss"][0]], rel=1e-2)


def test_trackers_get_the_worst_load_and_means():
    from drumline.train.records import RouterRecord, StepRecord

    router = RouterRecord((0, 1), (1.5, 3.0), (0.5, 0.0), (1.0, 2.0), (0.0, 0.5), None)
    record = StepRecord(3, 1.0, 1.0, 0.1, 10, 1.0, None, 1, 1.0, router)
    assert {name: value for name, value in scalars(record).items() if name.startswith("router/")} == {
        "router/load_max": 3.0,
        "router/load_min": 0.0,
        "router/entropy": 1.5,
        "router/dropped": 0.25,
    }
