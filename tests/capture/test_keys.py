"""Keys are ordered as a step computes, and patterns pick what lies within a module."""

import itertools
import random

import pytest

from drumline.capture.keys import KINDS, in_order, is_wanted, key, split_key
from drumline.models import build
from drumline.recipe import load


def test_a_key_is_taken_apart_again():
    assert key(3, "forward", "embedding", 1) == "3/forward/embedding#1"
    assert split_key("3/forward/embedding#1") == (3, "forward", "embedding#1")


def test_modules_come_in_the_order_in_which_a_real_forward_finishes_them():
    import torch

    recipe = load("qwen3-moe-debug", ["model.num_layers=3", "model.dim=32", "model.num_heads=2", "model.head_dim=16"])
    model = build(recipe.model, device="cpu")
    finished = []
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: finished.append(name))
    model(torch.zeros(1, 8, dtype=torch.int64))
    kept = [name for name in finished if name and not name.endswith(("_proj", "q_norm", "k_norm"))]
    names = [key(1, "forward", name) for name in kept]
    shuffled = random.Random(0).sample(names, len(names))
    assert in_order(shuffled) == names


def test_the_backward_names_a_module_s_gradient_before_those_of_its_parameters_and_comes_from_the_end():
    names = [
        "1/forward/layers.0",
        "1/forward/norm",
        "1/recompute/layers.0.attention",
        "1/loss/",
        "1/gradient/output.weight",
        "1/backward/norm",
        "1/gradient/norm.weight",
        "1/backward/layers.0",
        "1/backward/layers.0.mlp",
        "1/gradient/layers.0.mlp.down_proj.weight",
        "1/gradient/layers.0.mlp.gate_proj.weight",
        "1/backward/layers.0.mlp_norm",
        "1/gradient/layers.0.mlp_norm.weight",
        "1/backward/embedding",
        "1/gradient/embedding.weight",
        "1/norm/",
        "1/optimizer/norm.weight.exp_avg",
        "1/weight/norm.weight",
        "2/forward/embedding",
    ]
    assert in_order(reversed(names)) == names


def test_layers_are_ordered_as_numbers():
    names = [key(1, "forward", f"layers.{index}") for index in range(12)]
    assert in_order(sorted(names)) == names


def test_every_kind_has_a_place_in_the_order():
    keys = [key(step, kind, "norm.weight") for step, kind in itertools.product((1, 2), KINDS)]
    assert [split_key(text)[0] for text in in_order(keys)] == [1] * len(KINDS) + [2] * len(KINDS)


@pytest.mark.parametrize(
    ("name", "pattern", "wanted"),
    [
        ("layers.3.attention", "layers.*.attention", True),
        ("layers.3.attention.q_proj.weight", "layers.*.attention", True),
        ("layers.3.attention_norm", "layers.*.attention", False),
        ("layers.3", "layers.*.attention", False),
        ("embedding#1", "embedding", True),
        ("", "embedding", True),
    ],
)
def test_a_pattern_picks_a_module_and_what_is_in_it(name, pattern, wanted):
    assert is_wanted(name, [pattern]) is wanted
