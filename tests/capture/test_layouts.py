"""Whatever the layout, a capture reads as the logical tensors of one rank."""

import pytest
import torch
from tests.capture.runs import capture

from drumline.capture.diff import diff
from drumline.capture.keys import BACKWARD, FORWARD, GRADIENT, INIT, LOSS, NORM, OPTIMIZER, RECOMPUTE, WEIGHT, split_key

LAYOUTS = ["dp2", "fsdp2", "tp2", "cp2", "pp2"]
FURTHER = ["tp2 no-sp", "dp2.fsdp2", "pp2.tp2", "fsdp2.cp2", "pp2 zbv"]
WORDS = {
    "no-sp": ["layout.sequence_parallel=false"],
    "zbv": ["layout.pp_schedule=zbv", "model.num_layers=4"],
}
ROUNDING = 3e-6
"""Relative, of a tensor of fp32 after two steps of a model as deep as this; sound layouts came to 1.2e-6."""


def overrides(words):
    layout, *rest = words.split()
    return [f"layout={layout}", *(text for word in rest for text in WORDS[word])]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    made = {}

    def get(*changes, **options):
        if (changes, *options.items()) not in made:
            made[changes, *options.items()] = capture(tmp_path_factory.mktemp("one") / "c", *changes, **options)
        return made[changes, *options.items()]

    return get


@pytest.mark.parametrize("words", [*LAYOUTS, *(pytest.param(words, marks=pytest.mark.slow) for words in FURTHER)])
def test_a_layout_s_capture_is_one_rank_s_within_rounding(words, one_rank, tmp_path):
    deeper = ["model.num_layers=4"] if "zbv" in words else []
    reference, mine = one_rank(*deeper), capture(tmp_path / "c", *overrides(words))
    assert mine.keys == reference.keys
    found = diff(reference, mine, tolerance=ROUNDING)
    wrong = {row.key: (row.why, row.difference.relative) for row in found.different}
    assert not wrong
    assert found.is_equal


def test_it_holds_what_a_step_computes(one_rank):
    capture = one_rank()
    names = {kind: [split_key(key)[2] for key in capture.keys if key.startswith(f"2/{kind}/")] for kind in (
        FORWARD, BACKWARD, GRADIENT, OPTIMIZER, WEIGHT, LOSS, NORM
    )}  # fmt: skip
    modules = ["embedding"]
    for layer in range(2):
        inner = [f"layers.{layer}.{name}" for name in ("attention_norm", "attention", "mlp_norm", "mlp")]
        modules += [*inner, f"layers.{layer}"]
    assert names[FORWARD] == [*modules, "norm"]
    assert sorted(names[BACKWARD]) == sorted(names[FORWARD])
    assert len(names[GRADIENT]) == len(names[WEIGHT]) == 2 * 9 + 3
    assert len(names[OPTIMIZER]) == 2 * len(names[WEIGHT])
    assert len(names[LOSS]) == len(names[NORM]) == 1
    assert any(key.startswith(f"0/{INIT}/") for key in capture.keys)
    assert capture.shape("2/forward/layers.0.attention") == (8 * 32, 32)


def test_what_is_captured_is_what_a_plain_model_computes(one_rank):
    import numpy as np
    from tests.capture.runs import recipe

    from drumline.data.made_up import made_up
    from drumline.models import build, initialize

    resolved, found = recipe(), one_rank()
    model = build(resolved.model)
    model.to_empty(device="cpu")
    initialize(model, resolved.run.seed)
    seen = {}
    for name in ("embedding", "layers.0.attention", "layers.1", "norm"):

        def keep(_, __, output, name=name):
            output.retain_grad()
            seen[name] = output

        model.get_submodule(name).register_forward_hook(keep)
    rows = made_up(resolved.data, resolved.run.seed, resolved.model).rows(np.arange(8))
    tokens, labels, starts = map(torch.from_numpy, (rows.tokens_BT, rows.labels_BT, rows.starts_BT))
    loss = model(tokens, starts_BT=starts, labels_BT=labels) / (labels >= 0).sum()
    loss.backward()
    for name, output in seen.items():
        assert torch.allclose(found.read(f"1/forward/{name}").tensor, output.flatten(0, 1), rtol=1e-4, atol=1e-6), name
        grads = found.read(f"1/backward/{name}").tensor, output.grad.flatten(0, 1)
        assert torch.allclose(*grads, rtol=1e-3, atol=1e-7), name
    for name, param in model.named_parameters():
        assert torch.allclose(found.read(f"1/gradient/{name}").tensor, param.grad, rtol=1e-3, atol=1e-7), name
    assert float(found.read("1/loss/").tensor) == pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("level", ["hash", "stats"])
def test_hashes_of_a_layout_add_up_to_those_of_its_tensors(level, tmp_path):
    words = ("layout=fsdp2.tp2",)
    tensors, digests = capture(tmp_path / "a", *words), capture(tmp_path / "b", *words, level=level)
    assert diff(tensors, digests).is_equal
    assert not digests.has_elements
    statistics = digests.digest("1/weight/norm.weight")[0].statistics
    assert (statistics is None) == (level == "hash")
    if statistics is not None:
        weight = tensors.read("1/weight/norm.weight").tensor.double()
        assert (statistics.count, statistics.largest) == (32, float(weight.max()))
        assert statistics.total == pytest.approx(float(weight.sum()))


def test_what_is_computed_again_is_told_apart_and_has_the_same_bits(one_rank, tmp_path):
    again = capture(tmp_path / "c", "memory.activation_checkpointing=full")
    found = diff(one_rank(), again)
    assert found.is_equal
    recomputed = [key for key in again.keys if split_key(key)[1] == RECOMPUTE]
    assert recomputed
    assert set(recomputed) == set(found.only[1])
    for key in recomputed:
        step, _, name = split_key(key)
        assert torch.equal(again.read(key).tensor, again.read(f"{step}/forward/{name}").tensor)


def test_only_what_is_asked_for_is_recorded(tmp_path):
    found = capture(tmp_path / "c", only=("layers.*.attention",), steps=(2,))
    names = {(kind, name) for _, kind, name in map(split_key, found.keys) if kind in (FORWARD, GRADIENT)}
    outputs = {(FORWARD, f"layers.{n}.attention") for n in (0, 1)}
    assert names == outputs | {(GRADIENT, f"layers.{n}.attention.{w}_proj.weight") for n in (0, 1) for w in "qkvo"}
    assert {split_key(key)[0] for key in found.keys} == {1, 2}


def test_recording_changes_no_bit_and_leaves_no_hook(tmp_path, monkeypatch):
    from drumline.capture.recorder import Recorder

    real = Recorder.finish

    def finish(self):
        real(self)
        assert not any(module._forward_hooks for module in self._subject.model.modules())

    monkeypatch.setattr(Recorder, "finish", finish)
    both, last = capture(tmp_path / "a", steps=(1, 2)), capture(tmp_path / "b", steps=(2,))
    weights = [key for key in both.keys if key.startswith("2/")]
    assert all(torch.equal(both.read(key).tensor, last.read(key).tensor) for key in weights)
