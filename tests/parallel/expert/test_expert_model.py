"""A whole decoder whose experts are spread: loss, every gradient and their norm are those of one device, in fp64."""

import pytest
import torch
from tests.parallel.expert.comparison import Case, error, errors_of_one_device, on_one_device, run
from tests.ranks import run_ranks

from drumline.recipe import Layout

TWO = ("fsdp2.ep2", "cp2.ep2")
FOUR = ("fsdp4.ep2", "fsdp4.ep4", "dp2.fsdp2.ep2", "dp2.cp2.ep2", "fsdp2.cp2.ep4", "fsdp2.cp2.ep2", "cp4.ep2")
LIMIT = 1e-11


def check(case: Case, limit: float = LIMIT) -> None:
    def body():
        found = error(case)
        assert all(value <= limit for value in found.values()), {k: v for k, v in found.items() if not v <= limit}

    run_ranks(Layout.model_validate(case.layout).num_ranks, body)


def check_against_one_device(case: Case) -> None:
    def body():
        found, alone = error(case), errors_of_one_device(case)
        assert all(found[name] <= 2 * alone[name] for name in alone), {k: (found[k], alone[k]) for k in alone}

    run_ranks(Layout.model_validate(case.layout).num_ranks, body)


@pytest.mark.parametrize("layout", TWO + FOUR)
@pytest.mark.parametrize("kind", ["aux_loss", "bias"])
def test_loss_and_gradients_are_those_of_one_device(layout, kind):
    check(Case(layout, kind))


@pytest.mark.parametrize("layout", ["fsdp2.ep2", "fsdp4.ep2", "fsdp4.ep4"])
@pytest.mark.parametrize("kind", ["groups", "capacity"])
def test_groups_and_dropped_choices_travel(layout, kind):
    check(Case(layout, kind))


@pytest.mark.parametrize("layout", ["fsdp4.ep2", "cp4.ep2"])
@pytest.mark.parametrize("kind", ["few", "odd"])
def test_one_expert_is_cut_where_ranks_cannot_share_out_whole_ones(layout, kind):
    check(Case(layout, kind))


@pytest.mark.parametrize(
    ("layout", "kind", "share"), [("fsdp4.ep2", "bias", 4), ("fsdp4.ep2", "few", 4), ("cp4.ep2", "few", 2)]
)
def test_a_rank_holds_its_share_of_the_experts_and_no_more(layout, kind, share):
    def body():
        parts = run(Case(layout, kind))[1]
        whole = on_one_device(kind)[1]
        for name, (_, tensor) in parts.items():
            if ".experts." in name:
                assert tensor.numel() * share == whole[name].numel(), name

    run_ranks(4, body)


@pytest.mark.parametrize("zero", [1, 2])
@pytest.mark.parametrize("layout", ["fsdp2.ep2", "fsdp4.ep2", "dp2.fsdp2.ep2"])
def test_every_stage_of_zero_sums_over_the_experts_own_ranks(layout, zero):
    check(Case(layout, zero=zero))


@pytest.mark.parametrize("layout", ["fsdp2.ep2", "fsdp4.ep2", "fsdp4.ep4", "cp2.ep2"])
def test_ranks_that_receive_nothing_take_part(layout):
    check(Case(layout, "first_two"))


@pytest.mark.parametrize(
    ("layout", "checkpointing"),
    [("fsdp2.ep2", "full"), ("fsdp4.ep2", "full"), ("cp2.ep2", "full"), ("cp2.ep2", "selective"), ("cp2", "selective")],
)
def test_a_recomputed_block_exchanges_again(layout, checkpointing):
    check(Case(layout, "bias", checkpointing=checkpointing))


@pytest.mark.parametrize("layout", ["fsdp2.ep2", "fsdp4.ep4", "cp2.ep2"])
@pytest.mark.parametrize("kind", ["aux_loss", "first_two"])
def test_fp32_and_its_grouped_product_are_as_near_to_fp64(layout, kind):
    check(Case(layout, kind, compute=torch.float32), limit=1e-4)


@pytest.mark.parametrize("layout", ["fsdp2.ep2", "fsdp4.ep2", "cp2.ep2"])
def test_bf16_is_as_far_from_fp64_as_one_device_in_bf16(layout):
    check_against_one_device(Case(layout, "first_two", compute=torch.bfloat16))  # the choice cannot flip
