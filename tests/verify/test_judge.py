"""The verdict: rounding passes, a fault is named by the first tensor that is wrong."""

import math

import pytest
import torch

from drumline.capture.files import read, write
from drumline.capture.keys import in_order, key
from drumline.capture.parts import Joined, Part, join, same_bits
from drumline.verify.judge import LIMITS, judge
from drumline.verify.reference import Reference

GENERATOR = torch.Generator().manual_seed(0)
EXACT = {
    key(1, "forward", "layers.0"): torch.randn(6, 4, generator=GENERATOR, dtype=torch.float64),
    key(1, "loss"): torch.tensor(4.2, dtype=torch.float64),
    **{
        key(1, "gradient", name): torch.randn(8, 8, generator=GENERATOR, dtype=torch.float64)
        for name in ("embedding.weight", "layers.0.weight", "output.weight")
    },
    key(1, "norm"): torch.tensor(2.0, dtype=torch.float64),
    key(1, "weight", "output.weight"): torch.randn(8, 8, generator=GENERATOR, dtype=torch.float64),
    key(1, "routing", "layers.0"): torch.tensor([3, 5]),
}


def rounded(error=2.0**-24, change=lambda name, tensor: tensor):
    made = {}
    for name, tensor in EXACT.items():
        noise = torch.randn(tensor.shape, generator=GENERATOR, dtype=torch.float64)
        made[name] = change(name, tensor if tensor.dtype == torch.int64 else tensor * (1 + error * noise))
    return made


REFERENCE = Reference(EXACT, (rounded(), rounded()))


def test_rounding_passes():
    found = judge(Joined(rounded()), REFERENCE, "fp32")
    assert found.ok
    assert 0 < found.worst_ratio < LIMITS["fp32"]
    assert (found.first_wrong, found.why, found.bitwise, found.flips) == ("", "", True, 0)


@pytest.mark.parametrize("name", [name for name in EXACT if "routing" not in name])
def test_a_part_in_a_hundred_thousand_is_a_fault_and_is_named(name):
    found = judge(Joined(rounded(change=lambda n, t: t * (1 + 1e-5) if n == name else t)), REFERENCE, "fp32")
    assert not found.ok
    assert found.first_wrong == found.worst_key == name
    assert "times as far from fp64" in found.why


def test_first_weights_are_drawn_and_may_not_differ_at_all():
    name, drawn = key(0, "init", "norm.weight"), torch.ones(4)
    reference = Reference({**EXACT, name: drawn.double()}, ({**rounded(), name: drawn},))
    assert judge(Joined({**rounded(), name: drawn}), reference, "fp32").ok
    found = judge(Joined({**rounded(), name: torch.nextafter(drawn, 2 * drawn)}), reference, "fp32")
    assert (found.first_wrong, found.why) == (name, "is not what one device draws")


def test_of_several_the_first_to_be_computed_is_named():
    def change(name, tensor):
        return (
            tensor * 1.01 if "gradient/layers" in name or "gradient/embedding" in name or "weight/" in name else tensor
        )

    assert judge(Joined(rounded(change=change)), REFERENCE, "fp32").first_wrong == "1/gradient/layers.0.weight"


def test_not_a_number_is_a_fault():
    found = judge(Joined(rounded(change=lambda n, t: t * math.nan if n == key(1, "loss") else t)), REFERENCE, "fp32")
    assert not found.ok
    assert found.first_wrong == found.worst_key == key(1, "loss")


def test_one_device_that_is_exact_by_luck_makes_no_fault_of_rounding():
    lucky = Reference(EXACT, (EXACT, EXACT))
    assert judge(Joined(rounded()), lucky, "fp32").ok
    assert not judge(Joined(rounded(error=2.0**-20)), lucky, "fp32").ok


def test_what_is_missing_unequal_or_unknown_is_a_fault():
    name = key(1, "gradient", "output.weight")
    whole = rounded()
    assert judge(Joined(whole, unequal=(name,)), REFERENCE, "fp32").first_wrong == name
    assert not judge(Joined(whole, unequal=(name,)), REFERENCE, "fp32").bitwise
    assert judge(Joined(whole, missing=(name,)), REFERENCE, "fp32").first_wrong == name
    without = {other: tensor for other, tensor in whole.items() if other != name}
    assert judge(Joined(without), REFERENCE, "fp32").first_wrong == name
    extra = {**whole, key(1, "gradient", "ghost"): torch.zeros(2)}
    assert judge(Joined(extra), REFERENCE, "fp32").first_wrong == key(1, "gradient", "ghost")


def test_flipped_choices_are_counted_once_each():
    name = key(1, "routing", "layers.0")
    found = judge(Joined({**rounded(), name: torch.tensor([5, 3])}), REFERENCE, "fp32")
    assert found.flips == 2


def test_gradients_are_ordered_from_the_loss_backwards_within_steps():
    names = [key(2, "loss"), *EXACT]
    kinds = [name.split("/", 2)[:2] for name in in_order(names)]
    assert kinds[0] == ["1", "forward"]
    assert kinds[-1] == ["2", "loss"]
    gradients = [name.rsplit("/", 1)[1] for name in in_order(names) if "gradient" in name]
    assert gradients == ["output.weight", "layers.0.weight", "embedding.weight"]


def test_parts_join_to_the_whole_and_say_what_does_not_fit(tmp_path):
    whole = torch.arange(12.0).view(4, 3)
    upper = Part("a", (4, 3), whole[:3].clone(), (0, 0))
    lower = Part("a", (4, 3), whole[2:].clone(), (2, 0))
    rows = Part("b", (4, 3), whole[[3, 1]], rows_N=torch.tensor([3, 1]))
    write([upper, rows], tmp_path / "rank-0.safetensors")
    write([lower], tmp_path / "rank-1.safetensors")
    joined = join(read(path) for path in sorted(tmp_path.iterdir()))
    assert torch.equal(joined.tensors["a"], whole)
    assert torch.equal(joined.tensors["b"][[1, 3]], whole[[1, 3]])
    assert (joined.unequal, joined.missing) == ((), ("b",))


def test_a_replica_that_differs_in_one_bit_is_seen():
    first = torch.ones(4)
    second = first.clone()
    second[2] = torch.nextafter(second[2], torch.tensor(2.0))
    joined = join([[Part("a", (4,), first, (0,))], [Part("a", (4,), second, (0,))]])
    assert joined.unequal == ("a",)
    assert not same_bits(torch.zeros(1), -torch.zeros(1))


def test_a_norm_may_be_as_far_off_as_one_device_s_gradient_is():
    lucky = {**rounded(2.0**-9), key(1, "norm"): EXACT[key(1, "norm")]}
    reference = Reference(EXACT, (lucky, lucky))
    error = math.hypot(*(float((lucky[name] - EXACT[name]).norm()) for name in EXACT if "/gradient/" in name))

    def moved(by):
        return rounded(0.0, lambda name, x: x + by if name == key(1, "norm") else x)

    found = judge(Joined(moved(1.9 * error)), reference, "bf16")
    assert found.ok
    assert found.ratios[key(1, "norm")] == pytest.approx(1.9)
    assert not judge(Joined(moved(2.1 * error)), reference, "bf16").ok
