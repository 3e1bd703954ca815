"""Pipelines compute what one device computes: losses, gradients, norm and validation, under every schedule."""

import functools

import pytest
import torch
import torch.distributed as dist
from tests.parallel.pipeline.steps import assert_same_step, changed, on_one_device, through_pipeline
from tests.ranks import ranks

from drumline.memory import AliveBytes
from drumline.recipe.sections import Moe
from drumline.schedules import SCHEDULES

DENSE = changed()
TIED = changed(tie_embeddings=True)
UNEVEN = changed(num_layers=6)
EXPERTS = changed(
    num_layers=4,
    family="qwen3",
    qk_norm=True,
    moe=Moe(
        num_experts=4,
        experts_per_token=2,
        expert_hidden_dim=24,
        num_dense_layers=1,
        balance="aux_loss",
        aux_loss_coefficient=5.0,
    ),
)


FURTHER = EXPERTS.model_copy(update={"num_mtp_layers": 2, "mtp_loss_weight": 3.0})


@functools.cache
def expected(model_json, number):
    model = type(DENSE).model_validate_json(model_json)
    return on_one_device(model, number), on_one_device(model, number, torch.float32)


def check_step(model, number, **layout):
    found = through_pipeline(model, number, **layout)
    assert_same_step(found, *expected(model.model_dump_json(), number))
    return found


@pytest.mark.parametrize("name", SCHEDULES)
def test_two_ranks_take_the_step_of_one_device(name):
    @ranks(2)
    def body():
        for number in (1, 3, 5, 8):
            check_step(DENSE, number, pp=2, pp_schedule=name)
        check_step(TIED, 3, pp=2, pp_schedule=name)
        check_step(EXPERTS, 3, pp=2, pp_schedule=name)
        check_step(FURTHER, 3, pp=2, pp_schedule=name)

    body()


@pytest.mark.parametrize("name", SCHEDULES)
def test_four_ranks_take_the_step_of_one_device(name):
    @ranks(4)
    def body():
        for number in (1, 3, 8):
            check_step(DENSE, number, pp=4, pp_schedule=name)
        check_step(TIED, 5, pp=4, pp_schedule=name)

    body()


@ranks(4)
def test_uneven_layers_and_more_stages_a_rank():
    check_step(UNEVEN, 5, pp=4)
    check_step(EXPERTS, 5, pp=4, pp_schedule="zb-h1")


@ranks(2)
def test_more_stages_on_each_rank():
    for virtual in (2, 3, 4):
        check_step(DENSE, 5, pp=2, pp_schedule="interleaved-1f1b", pp_virtual=virtual)
    check_step(UNEVEN, 3, pp=2, pp_schedule="interleaved-zero-bubble", pp_virtual=3)


@pytest.mark.parametrize("name", ["1f1b", "interleaved-1f1b", "zb-h1", "zbv"])
@pytest.mark.parametrize("spread", [{"dp": 2}, {"fsdp": 2, "zero": 1}, {"fsdp": 2, "zero": 2}, {"fsdp": 2, "zero": 3}])
def test_replicas_and_shards_of_stages(name, spread):
    @ranks(4)
    def body():
        check_step(DENSE, 6, pp=2, pp_schedule=name, **spread)
        if name != "zbv" or "dp" in spread:
            check_step(TIED, 2, pp=2, pp_schedule=name, **spread)
        check_step(EXPERTS, 4, pp=2, pp_schedule=name, **spread)

    body()


@ranks(2)
def test_a_schedule_from_a_file_is_run(tmp_path):
    file = tmp_path / "own.csv"
    file.write_text("0F0,0F1,0B1,0B0\n1F1,1F0,1B1,1B0\n".replace("1F1,1F0", "1F0,1F1"))
    check_step(DENSE, 2, pp=2, pp_schedule=str(file))


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_activations_are_freed_when_their_backward_is_done(name):
    @ranks(2)
    def body():
        def most_alive(**layout):
            with AliveBytes() as alive:
                through_pipeline(DENSE, 8, pp=2, **layout)
            return alive.peak

        few, all_at_once = most_alive(pp_schedule=name), most_alive(pp_schedule="gpipe")
        assert few < 0.6 * all_at_once

    body()


@ranks(2)
def test_copies_of_a_tied_embedding_get_the_same_bits():
    for name in ("1f1b", "zb-h1"):
        grad = check_step(TIED, 3, pp=2, pp_schedule=name).gradients["embedding.weight"]
        both = [torch.empty_like(grad) for _ in range(2)]
        dist.all_gather(both, grad)
        assert torch.equal(*both)
