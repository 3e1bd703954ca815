"""Tensor parallelism against fp64 on one device, in the whole model: loss, gradient norm and every gradient."""

import pytest
import torch
from tests.parallel.tensor.comparison import (
    APART,
    ASYNC,
    EXPERTS,
    LATENT,
    LATENT_EXPERTS,
    NORMED,
    TIED,
    assembled,
    batch,
    on_one_device,
    recipe,
    too_far,
)
from tests.ranks import ranks

from drumline import models
from drumline.models.attention import SdpaAttend

MODELS = {"dense": (), "normed": NORMED, "tied": TIED, "experts": EXPERTS, "latent": LATENT, "both": LATENT_EXPERTS}
SPREAD = {"fsdp": ("layout.fsdp=2", "layout.ep=2", "layout.tp=2"), "cp": ("layout.cp=2", "layout.ep=2", "layout.tp=2")}
FULL, SELECTIVE = ("memory.activation_checkpointing=full",), ("memory.activation_checkpointing=selective",)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("way", [(), APART, ASYNC], ids=["sequence", "apart", "async"])
@pytest.mark.parametrize("degree", [2, 4])
def test_loss_and_gradients_are_those_of_one_device(degree, way, kind):
    @ranks(degree)
    def check():
        assert not too_far(*MODELS[kind], *way, f"layout.tp={degree}")

    check()


@pytest.mark.parametrize("kind", ["tied", "experts", "latent"])
@pytest.mark.parametrize("way", [(), APART, ASYNC], ids=["sequence", "apart", "async"])
@pytest.mark.parametrize("layout", ["dp2.tp2", "fsdp2.tp2", "cp2.tp2", "fsdp2.cp2.tp2"])
def test_with_data_and_context_parallelism_too(layout, way, kind):
    axes = tuple(f"layout.{part[:-1]}={part[-1]}" for part in layout.split("."))

    @ranks(2 ** len(axes))
    def check():
        assert not too_far(*MODELS[kind], *way, *axes)

    check()


@pytest.mark.parametrize("kind", ["experts", "both"])
@pytest.mark.parametrize("way", [(), APART, ASYNC], ids=["sequence", "apart", "async"])
@pytest.mark.parametrize("lent", SPREAD)
@ranks(4)
def test_with_experts_spread_too(lent, way, kind):
    assert not too_far(*MODELS[kind], *way, *SPREAD[lent])


@pytest.mark.parametrize("keep", [FULL, SELECTIVE], ids=["full", "selective"])
@pytest.mark.parametrize("way", [(), APART, ASYNC], ids=["sequence", "apart", "async"])
@ranks(2)
def test_with_recomputation_too(way, keep):
    assert not too_far(*EXPERTS, *way, *keep, "layout.tp=2")


@pytest.mark.parametrize("way", [(), APART], ids=["sequence", "apart"])
@ranks(4)
def test_logits_are_of_the_whole_vocabulary_and_no_more(way):
    made = assembled(*way, "layout.tp=4")
    model = models.build(recipe().model, attend=SdpaAttend(), device="cpu")
    models.initialize(model, seed=0)
    part = batch(33)
    logits, expected = (m(part.tokens_BT, starts_BT=part.starts_BT) for m in (made.model, model))
    assert logits.shape == (*part.tokens_BT.shape, 33)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_reference_has_labels_that_count_unevenly_and_every_gradient():
    labels = batch(33).labels_BT
    halves = (labels >= 0).unflatten(1, (2, -1)).sum((0, 2)).tolist()
    assert halves[0] > 1.2 * halves[1]
    exact = on_one_device(EXPERTS, torch.float64)
    assert all(value.norm() > 1e-6 for value in exact.values())
