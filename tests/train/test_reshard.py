"""What any layout committed, any other takes up bit for bit, weights and optimizer, and goes on with the same run."""

import functools
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.train.runs import assert_same_bits, rows, save_when_loaded, tensors, train_here
from tests.train.test_deepseek import DEEPSEEK
from tests.train.test_experts import EXPERTS
from tests.train.test_experts import KINDS as BALANCE

from drumline.cli.app import main
from drumline.parallel import apply
from drumline.train import assemble, setup
from drumline.train.console import show_bytes

AT, STEPS = 5, 7
KEYS = (
    "checkpoint.at_end=false",
    f"checkpoint.every={AT}",
    "data.global_batch=12",  # of 3 data-parallel ranks, too
    "data.seq_len=64",
    "run.validation_batches=0",
)
DENSE = (*KEYS, "model.num_kv_heads=4", "model.num_layers=4", "model.vocab_size=2049", f"run.steps={STEPS}")
MODELS = {
    "untied": DENSE,
    "tied": (*DENSE, "model.tie_embeddings=true", "model.family=qwen3", "model.qk_norm=true"),
    "bias": (*EXPERTS, *BALANCE["bias"], *KEYS, f"run.steps={STEPS}"),
    "aux_loss": (*EXPERTS, *BALANCE["aux_loss"], *KEYS, f"run.steps={STEPS}"),
    "deepseek": (*DEEPSEEK, *KEYS, f"run.steps={STEPS}"),
}
BEFORE = {  # the layout that writes, of each model
    "untied": "tp2.pp2",
    "tied": "cp2.fsdp2",
    "bias": "fsdp2.ep2",
    "aux_loss": "fsdp2.ep2",
    "deepseek": "tp2.pp2",
}
ZBV = "layout.pp_schedule=zbv"
ZERO1 = "layout.zero=1"
AFTER = {  # the layouts that read what it wrote
    "untied": (
        ("dp1",),
        ("dp4",),
        ("fsdp3",),
        ("fsdp2", ZERO1),
        ("tp4",),
        ("pp4",),
        ("pp2", ZBV),
        ("fsdp2.cp2",),
        ("tp2.cp2", "layout.sequence_parallel=false"),
        ("tp2.fsdp2",),
        ("tp2.pp2", "layout.pp_schedule=interleaved-1f1b"),
        ("tp2.pp2.dp2",),
    ),
    "tied": (
        ("dp1",),
        ("dp2",),
        ("fsdp3",),
        ("fsdp4", ZERO1),
        ("cp2", "layout.cp_method=ulysses"),
        ("tp2",),
        ("tp2", "layout.tp_async=true"),
        ("pp2", ZBV),
        ("pp4",),
        ("tp2.pp2",),
        ("tp2.fsdp2",),
        ("dp2.fsdp2.tp2",),
    ),
    "bias": (
        ("dp1",),
        ("dp2",),
        ("fsdp3",),
        ("tp2",),
        ("pp2",),
        ("fsdp4.ep4",),
        ("fsdp4.ep2",),
        ("cp2.ep2",),
        ("dp2.tp2",),
        ("tp2.pp2", "layout.sequence_parallel=false"),
        ("fsdp2.ep2.tp2",),
        ("fsdp2.ep2.pp2",),
    ),
    "aux_loss": (("tp2.pp2",), ("cp2.ep2.pp2",), ("fsdp2.ep2.tp2",)),
    "deepseek": (("dp1",), ("fsdp2.ep2",), ("fsdp2.ep2.tp2",), ("pp2",), ("cp2.ep2.pp2",)),
}
QUICK = {  # one of each kind of cut; the others are the long matrix
    ("untied", "fsdp3"),
    ("untied", "tp4"),
    ("untied", "pp2"),
    ("tied", "dp2.fsdp2.tp2"),
    ("tied", "tp2.pp2"),
    ("bias", "dp1"),
    ("bias", "fsdp4.ep4"),
    ("bias", "fsdp2.ep2.pp2"),
    ("deepseek", "fsdp2.ep2.tp2"),
}
CASES = [
    pytest.param(model, after, marks=() if (model, after[0]) in QUICK else pytest.mark.slow)
    for model, found in AFTER.items()
    for after in found
]


def commit_of(run: Path) -> Path:
    return run / "checkpoints" / f"step-{AT:08d}"


@dataclass
class Written:
    """A run that made a commit after step 5 and went on to step 7."""

    run: Path
    tensors: dict[str, torch.Tensor]


def written_by(run: Path, model: str, layout: str) -> Written:
    """Trains a model from its start."""
    train_here(run, *MODELS[model], f"layout={layout}")
    return Written(run, tensors(commit_of(run)))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    @functools.cache
    def write(model, layout) -> Written:
        return written_by(tmp_path_factory.mktemp(f"{model}-{layout}"), model, layout)

    return write


def go_on(run: Path, commit: Path, model: str, layout: str, *keys: str) -> Path:
    """Makes a run of a commit alone go on under a layout; gives what the ranks had taken up, saved again."""
    shutil.copytree(commit, commit_of(run))
    before = functools.partial(save_when_loaded, run / "again")
    train_here(run, *MODELS[model], f"layout={layout}", *keys, before=before)
    return run / "again" / commit_of(run).name


def assert_goes_on_as(run: Path, original: Path) -> None:
    """Holds the steps after a commit against those of the run that made it, up to fp32's rounding."""
    a, b = ([row for row in rows(run, "step") if row["step"] > AT] for run in (run, original))
    assert [row["step"] for row in a] == list(range(AT + 1, STEPS + 1))
    for name, tolerance in (("loss", 1e-5), ("mtp_loss", 1e-5), ("grad_norm", 1e-4)):
        found, expected = ([row[name] for row in steps if name in row] for steps in (a, b))
        assert found == pytest.approx(expected, rel=tolerance), name


def assert_taken_up(first: Written, run: Path, model: str, layout: str, *keys: str) -> None:
    """Holds what a layout takes up from a commit, and the steps that it then takes, against the run that wrote it."""
    assert_same_bits(tensors(go_on(run, commit_of(first.run), model, layout, *keys)), first.tensors)
    assert_goes_on_as(run, first.run)


@pytest.mark.parametrize(
    ("model", "after"), CASES, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_a_commit_is_taken_up_bit_for_bit_by_any_layout_and_the_run_goes_on(model, after, written, tmp_path):
    assert_taken_up(written(model, BEFORE[model]), tmp_path, model, *after)


def assert_commits_like_one_rank(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Holds every logical tensor against that of one rank: nothing is renamed, moved or swapped."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].shape == tensor.shape, name
        apart = (found[name].double() - tensor.double()).norm() / tensor.double().norm().clamp_min(1e-30)
        assert apart < 2e-3, f"{name}: {apart:.1e}"


@pytest.mark.parametrize("model", ["untied", "tied", "bias", "deepseek"])
def test_what_a_layout_commits_is_what_one_rank_commits(model, written):
    assert_commits_like_one_rank(written(model, BEFORE[model]).tensors, written(model, "dp1").tensors)


@pytest.mark.parametrize(("model", "layout"), [("untied", "dp1"), ("untied", "tp2.pp2"), ("bias", "fsdp2.ep2")])
def test_the_console_says_the_size_of_the_whole_commit_whatever_the_layout(model, layout, written, tmp_path, capfd):
    train_here(tmp_path, *MODELS[model], f"layout={layout}", "run.steps=1", "checkpoint.at_end=true")
    held = written(model, "dp1").tensors
    size = show_bytes(sum(tensor.numel() * tensor.element_size() for tensor in held.values()))
    assert f"commit at step 1: {size}, waited" in capfd.readouterr().out


@pytest.mark.parametrize(("model", "after"), [("untied", "dp1"), ("aux_loss", "dp1")])
def test_the_commands_on_a_checkpoint_take_it_from_any_layout(model, after, written, tmp_path, capsys):
    first = written(model, BEFORE[model])
    again = go_on(tmp_path / "run", commit_of(first.run), model, after)
    capsys.readouterr()

    def say(*arguments: object, code: int = 0) -> str:
        assert main(["checkpoint", *map(str, arguments)]) == code
        return capsys.readouterr().out

    (row,) = say("list", first.run).splitlines()[1:]
    layout = BEFORE[model].replace("tp2.pp2", "pp2.tp2")  # as the axes are ordered
    assert {layout, "whole", str(len(first.tensors))} <= set(row.split())
    shown = say("inspect", first.run, "--tensors")
    assert all(f"{name} " in shown for name in first.tensors)
    assert f"{layout}, written by {4 if model == 'untied' else 2} ranks" in shown
    assert say("verify", first.run).startswith("whole: ")
    assert say("diff", first.run, again).startswith(f"equal, bit for bit: {len(first.tensors)} tensors")
    for run, folder in ((first.run, "a"), (written(model, "dp1").run, "b")):
        say("export", run, tmp_path / folder)
    a, b = (
        {name: tensor for file in (tmp_path / folder).glob("*.safetensors") for name, tensor in load_file(file).items()}
        for folder in ("a", "b")
    )
    assert_commits_like_one_rank(a, b)
    shutil.copytree(commit_of(first.run), tmp_path / "changed")
    shard = next((tmp_path / "changed").glob("shard-00001-*"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert "shard-00001" in say("verify", tmp_path / "changed", code=1)


def with_offsets(patch, match):
    """Takes the part of the next rank, in every dim that is cut, of parameters whose names match."""
    right = apply.cut_parameters

    def cut_parameters(model, mesh, **options):
        places = right(model, mesh, **options)
        for name, place in places.items():
            if re.search(match, name):
                cut = zip(place.offsets, model.get_parameter(name).shape, place.shape, strict=True)
                offsets = tuple((start + n) % (n * -(-size // n)) if n < size else start for start, n, size in cut)
                places[name] = replace(place, offsets=offsets)
        return places

    patch(apply, "cut_parameters", cut_parameters)


def layers_are_numbered_within_a_stage(patch):
    for module in (assemble, setup):
        for function in ("model_pieces", "optimizer_pieces"):
            patch(module, function, _from_0(getattr(module, function)))


def _from_0(right):
    def pieces(*arguments):
        found = right(*arguments)
        first = min(int(match[1]) for piece in found if (match := re.search(r"layers\.(\d+)", piece.name)))

        def renamed(piece):
            return replace(piece, name=re.sub(r"layers\.(\d+)", lambda m: f"layers.{int(m[1]) - first}", piece.name))

        return [renamed(piece) for piece in found]

    return pieces


def every_offset_is_that_of_the_next_rank(patch):
    with_offsets(patch, ".")


def the_rows_of_one_matmul_are_those_of_the_next_rank(patch):
    with_offsets(patch, "down_proj")


def experts_are_those_of_the_next_rank(patch):
    with_offsets(patch, "experts")


FAULTS = [
    (layers_are_numbered_within_a_stage, "untied", "pp2"),
    (every_offset_is_that_of_the_next_rank, "untied", "tp2"),
    (the_rows_of_one_matmul_are_those_of_the_next_rank, "untied", "tp2"),
    (experts_are_those_of_the_next_rank, "bias", "fsdp2.ep2"),
]


@pytest.mark.parametrize(("fault", "model", "layout"), FAULTS)
def test_the_comparison_catches_faults_of_what_reads(fault, model, layout, written, tmp_path, monkeypatch):
    first = written(model, BEFORE[model])
    fault(monkeypatch.setattr)
    with pytest.raises(AssertionError):
        assert_taken_up(first, tmp_path, model, layout)


@pytest.mark.parametrize(("fault", "model", "layout"), FAULTS)
def test_the_comparison_catches_faults_of_what_writes(fault, model, layout, written, tmp_path, monkeypatch):
    expected = written(model, "dp1").tensors
    fault(monkeypatch.setattr)
    with pytest.raises(AssertionError):
        assert_commits_like_one_rank(written_by(tmp_path, model, layout).tensors, expected)
