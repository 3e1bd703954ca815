"""Runs with latent attention and multi-token prediction: every layout trains the same run, a resumed run is bit for bit
the one that was not, and a gradient that is lost is noticed."""

import pytest
import torch
from tests.train.runs import rows, steps, tensors, train, train_here

from drumline.checkpoint import open_commit
from drumline.checkpoint.conversion import export_commit, import_huggingface
from drumline.models.multi_token import MultiToken
from drumline.report.charts import build_charts
from drumline.report.run import read_run
from drumline.train.records import StepRecord
from drumline.train.trackers import scalars

DEEPSEEK = (
    "model.family=deepseek_v3",
    "model.num_kv_heads=4",
    "model.head_dim=24",
    "model.mla.q_lora_rank=48",
    "model.mla.kv_lora_rank=32",
    "model.mla.qk_nope_head_dim=16",
    "model.mla.qk_rope_head_dim=8",
    "model.mla.v_head_dim=16",
    "model.yarn.factor=4",
    "model.yarn.original_max_seq_len=64",
    "model.num_mtp_layers=2",
    "model.num_layers=2",
    "model.moe.num_experts=8",
    "model.moe.experts_per_token=2",
    "model.moe.expert_hidden_dim=48",
    "model.moe.num_dense_layers=1",
    "model.moe.num_shared_experts=1",
    "model.moe.scoring=sigmoid",
    "model.moe.balance=bias",
    "model.moe.bias_update_speed=0.02",
    "checkpoint.at_end=false",
    "run.steps=5",
)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    run = tmp_path_factory.mktemp("one")
    train_here(run, *DEEPSEEK)
    return rows(run, "step"), rows(run, "validation")


def assert_same_run(run, one_rank):
    found, expected = rows(run, "step"), one_rank[0]
    assert [row["num_tokens"] for row in found] == [row["num_tokens"] for row in expected]
    for name, tolerance in (("loss", 1e-5), ("mtp_loss", 1e-5), ("grad_norm", 1e-3)):
        assert [row[name] for row in found] == pytest.approx([row[name] for row in expected], rel=tolerance)
    losses = [[row["loss"] for row in validation] for validation in (rows(run, "validation"), one_rank[1])]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize(
    "overrides",
    [
        ("layout=dp2",),
        ("layout=fsdp2", "layout.zero=1"),
        ("layout=fsdp2", "layout.zero=2"),
        ("layout=fsdp2", "layout.zero=3"),
        ("layout=dp2.fsdp2",),
        ("layout=cp2",),
        ("layout=cp2", "layout.cp_method=gather"),
        ("layout=cp2", "layout.cp_method=ulysses"),
        ("layout=cp4", "layout.cp_method=ring_ulysses", "layout.cp_ulysses=2"),
        ("layout=fsdp2.cp2", "memory.activation_checkpointing=full"),
        ("layout=tp2",),
        ("layout=tp2", "layout.sequence_parallel=false"),
        ("layout=fsdp2.tp2", "layout.tp_async=true"),
        ("layout=cp2.tp2", "memory.activation_checkpointing=selective"),
        ("data.micro_batch=4",),
        ("model.attention=sdpa",),
        ("memory.activation_checkpointing=selective", "layout=fsdp2"),
        ("memory.activation_checkpointing=every_n", "layout=dp2"),
    ],
    ids=" ".join,
)
def test_losses_are_those_of_one_rank(overrides, one_rank, tmp_path):
    train_here(tmp_path, *DEEPSEEK, *overrides)
    assert_same_run(tmp_path, one_rank)


def test_documents_may_be_left_unmasked(tmp_path):
    keys = (*DEEPSEEK, "data.document_mask=false")
    train_here(tmp_path / "one", *keys)
    train_here(tmp_path / "two", *keys, "layout=cp2")
    assert_same_run(tmp_path / "two", (rows(tmp_path / "one", "step"), rows(tmp_path / "one", "validation")))


def test_the_modules_routers_are_balanced_too(one_rank):
    for row in one_rank[0]:
        assert row["router"]["layers"] == [1, 2, 3]  # one layer of the model, and both modules
        assert (torch.tensor(row["router"]["load"]).sum(1) == 2 * 8 * 128).all()


def test_the_modules_learn(one_rank):
    losses = [row["mtp_loss"] for row in one_rank[0]]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] - losses[-1] > 0.02


def test_the_report_and_the_trackers_have_the_modules_loss(tmp_path):
    train_here(tmp_path, *DEEPSEEK, "run.steps=2")
    found = [row["mtp_loss"] for row in rows(tmp_path, "step")]
    (chart,) = [chart for chart in build_charts([read_run(tmp_path)]) if chart["key"] == "mtp_loss"]
    assert chart["series"][0]["y"] == pytest.approx(found, rel=1e-5)
    record = StepRecord(1, 3.0, 1.0, 0.1, 10, 1.0, None, 1, 1.0, mtp_loss=2.5)
    assert scalars(record)["train/mtp_loss"] == 2.5


def test_a_weight_of_0_trains_the_model_without_modules(tmp_path):
    train_here(tmp_path / "zero", *DEEPSEEK, "model.mtp_loss_weight=0", "optimizer.weight_decay=0")
    train_here(tmp_path / "none", *DEEPSEEK, "model.num_mtp_layers=0", "optimizer.weight_decay=0")
    assert steps(tmp_path / "zero") == steps(tmp_path / "none")
    assert "mtp_loss" not in rows(tmp_path / "none", "step")[0]


def test_the_comparison_catches_a_gradient_that_is_dropped(one_rank, tmp_path, monkeypatch):
    right = MultiToken.forward

    def forward(self, *inputs):
        found, routed = right(self, *inputs)
        return found.detach(), routed

    monkeypatch.setattr(MultiToken, "forward", forward)
    train_here(tmp_path, *DEEPSEEK)
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path, one_rank)


def test_the_comparison_catches_labels_that_each_rank_shifts_alone(one_rank, tmp_path, monkeypatch):
    from drumline.parallel.context import ContextSplit

    right = ContextSplit.shard_batch

    def shard_batch(self, batch):
        part = right(self, batch)
        late = tuple(
            further._replace(labels_BT=part.labels_BT.roll(-depth, 1)) for depth, further in enumerate(part.ahead, 1)
        )
        return type(part)(part.tokens_BT, part.labels_BT, part.starts_BT, late)

    monkeypatch.setattr(ContextSplit, "shard_batch", shard_batch)
    train_here(tmp_path, *DEEPSEEK, "layout=cp2")
    with pytest.raises(AssertionError):
        assert_same_run(tmp_path, one_rank)


@pytest.mark.parametrize("layout", ["dp1", "fsdp2", "cp2"])
def test_a_killed_run_resumes_bit_for_bit(layout, tmp_path):
    through, killed = tmp_path / "through", tmp_path / "killed"
    keys = (*DEEPSEEK, "checkpoint.at_end=true", "run.steps=8", "checkpoint.every=3", f"layout={layout}")
    train_here(through, *keys)
    train_here(killed, *keys, kill_after=5)
    train_here(killed, *keys)
    assert rows(killed, "start")[-1]["step"] == 3
    assert steps(killed) == steps(through)
    ahead = [[row["mtp_loss_hex"] for row in rows(run, "step")] for run in (killed, through)]
    assert ahead[0] == ahead[1]
    a, b = (tensors(run / "checkpoints" / "step-00000008") for run in (killed, through))
    assert {"model.mtp.1.merge_proj.weight", "model.mtp.0.block.mlp.router.bias"} <= a.keys()
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_goes_on_under_another_layout(one_rank, tmp_path):
    keys = (*DEEPSEEK, "checkpoint.every=2")
    train_here(tmp_path, *keys, "layout=fsdp2", kill_after=3)
    train_here(tmp_path, *keys, "layout=cp2")
    assert [row["layout"] for row in rows(tmp_path, "start")] == ["fsdp2", "cp2"]
    assert_same_run(tmp_path, one_rank)


def test_a_run_goes_on_from_a_hugging_face_folder_of_itself(tmp_path):
    keys = (*DEEPSEEK, "model.norm_eps=1e-6")
    train_here(tmp_path / "run", *keys, "checkpoint.at_end=true")
    export_commit(open_commit(tmp_path / "run" / "checkpoints" / "step-00000005"), tmp_path / "folder")
    imported = import_huggingface(tmp_path / "folder", tmp_path / "again")
    a, b = tensors(tmp_path / "run" / "checkpoints" / "step-00000005"), tensors(imported)
    assert b.keys() == {name for name in a if name.startswith("model.")}
    assert all(torch.equal(a[name], b[name]) for name in b)
    train_here(tmp_path / "again", *keys, "layout=fsdp2")
    last, first = rows(tmp_path / "run", "validation")[-1], rows(tmp_path / "again", "validation")[0]
    assert first["loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert rows(tmp_path / "again", "step")[0]["mtp_loss"] < rows(tmp_path / "run", "step")[0]["mtp_loss"]


def test_a_module_that_is_not_finite_stops_the_run_and_is_named(tmp_path, monkeypatch):
    right = MultiToken.forward

    def forward(self, *inputs):
        found, routed = right(self, *inputs)
        return found * float("inf"), routed

    monkeypatch.setattr(MultiToken, "forward", forward)
    with pytest.raises(AssertionError, match=r"stopped before the optimizer step\n.*output of mtp.0"):
        train_here(tmp_path, *DEEPSEEK)


@pytest.mark.parametrize("layout", ["dp1", "fsdp2"])
def test_bf16_trains_close_to_fp32(layout, one_rank, tmp_path):
    train_here(tmp_path, *DEEPSEEK, "precision.compute=bf16", f"layout={layout}")
    for name in ("loss", "mtp_loss"):
        found = [row[name] for row in rows(tmp_path, "step")]
        assert found == pytest.approx([row[name] for row in one_rank[0]], rel=1e-2)
        assert found != [row[name] for row in one_rank[0]]


@pytest.mark.slow
def test_compiled_blocks_train_the_same_run(tmp_path):
    # As processes of their own: inductor's workers do not survive a fork of a parent that has used them.
    keys = (*DEEPSEEK, "precision.compute=bf16", "run.steps=3", "run.validation_batches=0")
    for name, is_compiled in (("plain", "false"), ("compiled", "true")):
        result = train(tmp_path / name, *keys, f"run.compile={is_compiled}", timeout_s=280)
        assert result.returncode == 0, result.stderr
    plain, compiled = (rows(tmp_path / name, "step") for name in ("plain", "compiled"))
    for name in ("loss", "mtp_loss"):
        assert [row[name] for row in compiled] == pytest.approx([row[name] for row in plain], rel=2e-3)
