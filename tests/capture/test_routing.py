"""Mixtures of experts: choices are recorded, replayed, and a flip is told from a fault."""

import pytest
import torch
from tests.capture.runs import capture, recipe
from tests.capture.test_diff import change
from tests.mutants.gated import record

from drumline.capture.baseline import read_baseline
from drumline.capture.diff import diff
from drumline.capture.gate import gate
from drumline.capture.keys import CHOICE, ROUTER, split_key
from drumline.capture.reading import Capture
from drumline.cli.app import main
from drumline.verify import calibrate

MOE = ("model.num_kv_heads=2", "model.moe.num_experts=4", "model.moe.expert_hidden_dim=32")
BASE = "qwen3-moe-debug"
FORCED_ROUNDING = 2e-5


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return capture(tmp_path_factory.mktemp("moe") / "c", *MOE, base=BASE)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory):
    folder = tmp_path_factory.mktemp("baseline") / "b"
    few = [(name, values) for name, values in calibrate.VARIANTS if name in ("one rank", "micro-batch 2", "dp2")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "VARIANTS", few)
        calibrate.calibrate(recipe(*MOE, base=BASE), folder, num_steps=1, notify=lambda line: None)
    return folder


def keys_of(found, kind):
    return [key for key in found.keys if split_key(key)[1] == kind]


def test_logits_and_choices_are_recorded_for_every_token(reference):
    choices, logits = keys_of(reference, CHOICE), keys_of(reference, ROUTER)
    assert len(choices) == len(logits) > 0
    for choice, logit in zip(choices, logits, strict=True):
        experts_NK, logits_NE = reference.read(choice).tensor, reference.read(logit).tensor
        assert len(experts_NK) == len(logits_NE) == 8 * 32
        wanted = logits_NE.topk(experts_NK.shape[1], dim=-1).indices.sort(dim=-1).values
        assert torch.equal(experts_NK, wanted)


@pytest.mark.parametrize("words", ["layout=fsdp2.ep2", "layout=tp2"])
def test_a_layout_with_experts_reads_as_one_rank(words, reference, tmp_path):
    found = diff(reference, capture(tmp_path / "c", *MOE, words, base=BASE), tolerance=FORCED_ROUNDING)
    assert found.is_equal, (found.first, found.different[0].difference)


def test_forced_routing_replays_the_choices_and_leaves_the_rest_comparable(reference, tmp_path):
    other = ("precision.compute=bf16", "memory.activation_checkpointing=full")
    free = capture(tmp_path / "free", *MOE, *other, base=BASE)
    forced = capture(tmp_path / "forced", *MOE, *other, base=BASE, routing=reference.folder)
    moved = [
        key for key in keys_of(reference, CHOICE) if not torch.equal(free.read(key).tensor, reference.read(key).tensor)
    ]
    assert moved, "bf16 flips some choices, or this test shows nothing"
    for key in keys_of(reference, CHOICE):
        assert torch.equal(forced.read(key).tensor, reference.read(key).tensor)
    logits = keys_of(reference, ROUTER)[-1]
    assert not torch.equal(forced.read(logits).tensor, reference.read(logits).tensor.to(torch.bfloat16))


def test_a_choice_that_was_forced_elsewhere_weighs_as_the_run_s_own_scores_say(reference, tmp_path):
    again = capture(tmp_path / "c", *MOE, base=BASE, routing=reference.folder)
    assert diff(reference, again, tolerance=FORCED_ROUNDING).is_equal  # a token's experts are summed in another order


def test_routing_needs_every_step_that_is_trained(reference, tmp_path):
    with pytest.raises(AssertionError, match="has choices of steps"):
        capture(tmp_path / "a", *MOE, base=BASE, steps=(1, 2, 3), routing=reference.folder)
    with pytest.raises(AssertionError, match="every step that is trained must be"):
        capture(tmp_path / "b", *MOE, base=BASE, steps=(2,), routing=reference.folder)
    dense = capture(tmp_path / "dense", steps=(1,))
    with pytest.raises(AssertionError, match="has no choices of experts"):
        capture(tmp_path / "c", *MOE, base=BASE, steps=(1,), routing=dense.folder)


def test_bf16_with_forced_routing_passes_the_gate_and_flips_are_told_without_it(baseline, tmp_path, capsys):
    recipe_file = f"{baseline}/recipe.json"
    free = record(tmp_path / "free", ("precision.compute=bf16",), baseline=baseline, steps=(1,))
    found = gate(free, read_baseline(baseline))
    assert found.passes, [(check.key, check.why) for check in found.failed[:3]]
    if found.flips:
        assert found.unjudged
    arguments = [
        "precision.compute=bf16",
        "--steps",
        "1",
        "--force-routing",
        str(baseline),
        "--out",
        str(tmp_path / "f"),
    ]
    assert main(["numerics", "capture", recipe_file, *arguments]) == 0
    forced = gate(Capture(tmp_path / "f"), read_baseline(baseline))
    assert forced.passes, [(check.key, check.why) for check in forced.failed[:3]]
    assert not forced.flips
    assert not forced.unjudged


def test_a_choice_that_rounding_does_not_explain_is_a_fault(baseline, tmp_path):
    folder = tmp_path / "c"
    key = keys_of(record(folder, baseline=baseline, steps=(1,)), CHOICE)[0]

    def swap(experts_NK):
        free = [expert for expert in range(4) if expert not in experts_NK[0].tolist()]
        experts_NK[0, 0] = free[0]
        return experts_NK.sort(dim=-1).values

    change(folder, key, swap)
    found = gate(Capture(folder), read_baseline(baseline))
    assert found.failed[0].key == key
    assert "rounding of their scores does not explain" in found.failed[0].why


def test_a_flip_between_equal_scores_is_told_and_what_follows_is_not_judged(baseline, tmp_path):
    folder = tmp_path / "c"
    choice = keys_of(record(folder, baseline=baseline, steps=(1,)), CHOICE)[0]
    logits = choice.replace(f"/{CHOICE}/", f"/{ROUTER}/")
    taken: list[int] = []

    def swap(experts_NK):
        free = next(expert for expert in range(4) if expert not in experts_NK[0].tolist())
        taken.extend((free, int(experts_NK[0, 0])))
        experts_NK[0, 0] = free
        return experts_NK.sort(dim=-1).values

    def exchange(logits_NE):
        logits_NE[0, taken] = logits_NE[0, taken[::-1]]
        return logits_NE

    change(folder, choice, swap)
    change(folder, logits, exchange)
    found = gate(Capture(folder), read_baseline(baseline))
    assert found.flips == ((choice, 1),)
    assert found.unjudged > 50
    assert {check.key for check in found.failed} == {logits}  # whose scores are wrong, and so explain the flip


PIECES = ("numerics.mode=exact", "numerics.blocks=2", "data.micro_batch=1")


@pytest.mark.parametrize("words", [("layout=cp2.tp2",), ("layout=fsdp2.ep2", "memory.activation_checkpointing=full")])
def test_experts_in_fixed_pieces_tell_the_same_of_every_token_under_every_layout(words, tmp_path):
    one = capture(tmp_path / "one", *MOE, *PIECES, base=BASE, steps=(1,))
    many = capture(tmp_path / "many", *MOE, *PIECES, *words, base=BASE, steps=(1,))
    for kind in (CHOICE, ROUTER):
        assert keys_of(one, kind)
        assert keys_of(one, kind) == keys_of(many, kind)
        for key in keys_of(one, kind):
            assert torch.equal(one.read(key).tensor, many.read(key).tensor), key


def test_experts_in_fixed_pieces_go_where_a_reference_went(reference, tmp_path):
    own = capture(tmp_path / "own", *MOE, *PIECES, base=BASE, steps=(1,))
    again = capture(tmp_path / "again", *MOE, *PIECES, "layout=tp2", base=BASE, steps=(1,), routing=own.folder)
    assert diff(own, again).is_equal  # who is sent where it goes anyway keeps its bits

    bf16 = capture(tmp_path / "bf16", *MOE, "precision.compute=bf16", base=BASE, steps=(1,))
    moved = [key for key in keys_of(bf16, CHOICE) if not torch.equal(own.read(key).tensor, bf16.read(key).tensor)]
    assert moved, "bf16 flips some choices, or this test shows nothing"
    forced = capture(tmp_path / "forced", *MOE, *PIECES, "layout=tp2", base=BASE, steps=(1,), routing=bf16.folder)
    for key in keys_of(bf16, CHOICE):
        assert torch.equal(forced.read(key).tensor, bf16.read(key).tensor)
