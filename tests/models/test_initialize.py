"""Initial weights: their statistics, and the same bits however they are sharded."""

import math

import pytest
import torch
from tests.models.hf_reference import LLAMA, QWEN
from tests.models.moe_reference import with_moe
from tests.ranks import ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from drumline.models import build, initialize
from drumline.parallel.place import holder, whole_places

WIDE = LLAMA.model_copy(update={"dim": 256, "hidden_dim": 512, "num_layers": 3, "vocab_size": 1000, "init_std": 0.02})


def initialized(model, seed=0):
    decoder = build(model)
    decoder.to_empty(device="cpu")
    initialize(decoder, seed)
    return decoder


def test_weights_have_the_stated_standard_deviations():
    for name, parameter in initialized(WIDE).named_parameters():
        if "norm" in name:
            assert (parameter == 1).all(), name
            continue
        expected = 0.02 / math.sqrt(6) if "o_proj" in name or "down_proj" in name else 0.02
        assert abs(parameter.std() / expected - 1) < 5 / math.sqrt(2 * parameter.numel()), name
        assert abs(parameter.mean()) < 5 * expected / math.sqrt(parameter.numel()), name


def test_weights_depend_on_seed_and_name_only():
    first, again, other = initialized(WIDE), initialized(WIDE), initialized(WIDE, seed=1)
    deeper = dict(initialized(WIDE.model_copy(update={"num_layers": 5})).named_parameters())
    for (name, a), b, c in zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)
        assert "norm" in name or not torch.equal(a, c)
        if name.endswith("q_proj.weight"):
            assert torch.equal(a, deeper[name])
    q, k = first.layers[0].mlp.gate_proj.weight, first.layers[1].mlp.gate_proj.weight
    assert not torch.equal(q, k)


@pytest.mark.parametrize("model", [LLAMA, QWEN, with_moe(num_shared_experts=1)], ids=["untied", "tied", "experts"])
def test_fsdp_shards_of_uneven_size_have_the_bits_of_one_device(model):
    @ranks(3)
    def body():
        decoder = build(model)
        for block in decoder.layers:
            fully_shard(block)
        fully_shard(decoder)
        decoder.to_empty(device="cpu")
        initialize(decoder, 5, holder(whole_places(decoder)))
        whole = dict(initialized(model, 5).named_parameters())
        sizes = set()
        for name, parameter in decoder.named_parameters():
            sizes.add(parameter.to_local().shape[0])
            assert torch.equal(parameter.full_tensor(), whole[name]), name
        assert len(sizes) > 2

    body()


@ranks(4)
def test_shards_in_two_dims_have_the_bits_of_one_device():
    mesh = init_device_mesh("cpu", (2, 2))
    decoder = initialized(LLAMA, 9)
    whole = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
    for module in decoder.modules():
        for name, parameter in module.named_parameters(recurse=False):
            placements = [Shard(0), Shard(1)] if parameter.ndim == 2 else [Shard(0), Shard(0)]
            sharded = distribute_tensor(torch.full_like(parameter, torch.nan), mesh, placements)
            setattr(module, name, torch.nn.Parameter(sharded))
    initialize(decoder, 9, holder(whole_places(decoder)))
    for name, parameter in decoder.named_parameters():
        assert torch.equal(parameter.full_tensor(), whole[name]), name


def test_building_and_initializing_leave_the_global_generator_alone():
    before = torch.random.get_rng_state()
    initialize(build(LLAMA, device="cpu"), 0)
    assert torch.equal(before, torch.random.get_rng_state())
