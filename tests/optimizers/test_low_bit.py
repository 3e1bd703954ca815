import math

import pytest
import torch
from torch import nn

from drumline.optimizers import build_adamw, materialize_states
from drumline.optimizers.low_bit import LowBitAdamW
from drumline.parallel.place import Place, whole_places
from drumline.recipe.sections import Optimizer

SECTION = Optimizer(lr=0.02, weight_decay=0.1, beta2=0.999, state_dtype="bf16")


def model(seed: int = 0) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    module = nn.Sequential(nn.Linear(10, 13, bias=False), nn.LayerNorm(13, bias=False))
    for param in module.parameters():
        param.data = torch.randn(param.shape, generator=generator)
    return module


def gradients(step: int, shape) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 + step)) * 1e-3


def train(module: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, first: int = 0) -> None:
    for step in range(first, first + num_steps):
        for param in module.parameters():
            param.grad = gradients(step, param.shape)
        optimizer.step()


def test_moments_take_half_the_bytes_and_weights_stay_fp32():
    module = model()
    optimizer = build_adamw(module, SECTION, whole_places(module), 0)
    train(module, optimizer, 1)
    for param in module.parameters():
        assert param.dtype == torch.float32
        assert {optimizer.state[param][name].dtype for name in ("exp_avg", "exp_avg_sq")} == {torch.bfloat16}


def test_weights_follow_torchs_adamw_as_closely_as_bf16_allows():
    ours, torchs = model(), model()
    train(ours, build_adamw(ours, SECTION, whole_places(ours), 0), 50)
    fp32 = SECTION.model_copy(update={"state_dtype": "fp32", "implementation": "foreach"})
    train(torchs, build_adamw(torchs, fp32, whole_places(torchs), 0), 50)
    for a, b, start in zip(ours.parameters(), torchs.parameters(), model().parameters(), strict=True):
        moved = (b - start).norm()
        assert 0 < (a - b).norm() < 0.01 * moved


def test_the_first_step_is_torchs_bit_for_bit():
    # Moments start at zero, which bf16 holds: nothing has been rounded yet that the first step reads.
    ours, torchs = model(), model()
    train(ours, build_adamw(ours, SECTION, whole_places(ours), 0), 1)
    fp32 = SECTION.model_copy(update={"state_dtype": "fp32", "implementation": "foreach"})
    train(torchs, build_adamw(torchs, fp32, whole_places(torchs), 0), 1)
    for a, b in zip(ours.parameters(), torchs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=3e-7, atol=0.0)


def test_a_second_moment_of_small_steps_grows_where_rounding_to_nearest_stands_still():
    # v tends to g**2 = 1 from 0.25: its increments of (1 - 0.999) * 0.75 are below half a unit of bf16's 2**-9.
    weight = nn.Parameter(torch.zeros(4096))
    places = {"w": Place((4096,), (0,))}
    optimizer = LowBitAdamW(
        [{"params": [weight], "names": ("w",)}], places=places, seed=0, lr=0.0, betas=(0.9, 0.999), eps=1e-8
    )
    materialize_states(optimizer, 0)
    v = optimizer.state[weight]["exp_avg_sq"]
    v.fill_(0.25)
    for _ in range(200):
        weight.grad = torch.ones(4096)
        optimizer.step()
    expected = 1.0 - 0.75 * 0.999**200
    # Each step's rounding has a variance below (2**-8)**2 / 4; 200 of them, over 4,096 elements.
    assert abs(v.double().mean().item() - expected) < 5 * math.sqrt(200 / 4096) * 2.0**-9
    assert torch.tensor(0.25 * 0.999 + 0.001).bfloat16().item() == 0.25


CUTS = {
    "rows": [((0, 0), (5, 10)), ((5, 0), (8, 10))],
    "columns": [((0, 0), (13, 3)), ((0, 3), (13, 7))],
    "both": [((r, c), (r2 - r, c2 - c)) for r, r2 in ((0, 7), (7, 13)) for c, c2 in ((0, 5), (5, 10))],
}


@pytest.mark.parametrize("cut", list(CUTS))
def test_states_and_weights_have_the_same_bits_however_they_are_cut(cut):
    def fresh():
        return torch.randn((13, 10), generator=torch.Generator().manual_seed(1))

    def moved(offsets, size):
        box = tuple(slice(o, o + s) for o, s in zip(offsets, size, strict=True))
        weight = nn.Parameter(fresh()[box].contiguous())
        optimizer = LowBitAdamW(
            [{"params": [weight], "names": ("w",)}],
            places={"w": Place((13, 10), offsets)},
            seed=4,
            lr=0.01,
            betas=(0.9, 0.95),
            eps=1e-8,
        )
        for step in range(3):
            weight.grad = gradients(step, (13, 10))[box].contiguous()
            optimizer.step()
        return box, (weight.detach(), optimizer.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg_sq"])

    _, whole = moved((0, 0), (13, 10))
    for offsets, size in CUTS[cut]:
        box, part = moved(offsets, size)
        for a, b in zip(whole, part, strict=True):
            assert torch.equal(a[box], b)


def test_states_that_were_saved_go_on_with_the_same_bits():
    through, stopped = model(), model()
    train(through, build_adamw(through, SECTION, whole_places(through), 9), 4)
    first = build_adamw(stopped, SECTION, whole_places(stopped), 9)
    train(stopped, first, 2)
    second = build_adamw(stopped, SECTION, whole_places(stopped), 9)
    materialize_states(second, 2)
    for param in stopped.parameters():
        for moment in ("exp_avg", "exp_avg_sq"):
            second.state[param][moment].copy_(first.state[param][moment])
    train(stopped, second, 2, first=2)
    for a, b in zip(through.parameters(), stopped.parameters(), strict=True):
        assert torch.equal(a, b)
