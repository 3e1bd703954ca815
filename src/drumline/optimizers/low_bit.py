"""AdamW whose moments are held in bf16: half the bytes, and no increment lost for being small.

    m, v in fp32 from bf16;  AdamW's step in fp32;  m, v back to bf16, rounded up or down at random

The second moment moves by (1 - beta2) of what it lacks, which is below half a unit in bf16's last place for beta2 >
0.998: rounding to nearest would let it stand still. The random bits are a function of the seed, the parameter, the step
and the logical element, so that states are the same bits however parameters are spread over ranks.
Sources: AdamW, Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2; stochastic rounding of optimizer states,
arXiv:2502.20566.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from drumline.numerics.random import box_words
from drumline.numerics.rounding import round_stochastically
from drumline.parallel import Places, held

_CHUNK_ELEMENTS = {"cpu": 1 << 16}  # what is made of a chunk stays in a core's cache
_CHUNK_ELEMENTS_ELSEWHERE = 1 << 24


class LowBitAdamW(torch.optim.Optimizer):
    """AdamW with bf16 moments and stochastic rounding.

    Args:
        groups: each with `params`, `names` of these (logical), and hyper-parameters of its own.
        places: of the parameters, by logical name.
        seed: of the run.
        lr: learning rate.
        betas: decays of the two moments.
        eps: added to the root of the second moment.
    """

    def __init__(
        self,
        groups: Sequence[dict[str, Any]],
        *,
        places: Places,
        seed: int,
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ):
        self._places = places
        self._seed = seed
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0, "state_dtype": torch.bfloat16}
        super().__init__([dict(group) for group in groups], defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Moves every parameter that has a gradient.

        Args:
            closure: none is taken.

        Raises:
            ValueError: a closure was given.
        """
        if closure is not None:
            raise ValueError("LowBitAdamW takes no closure: gradients are there when it steps")
        for group in self.param_groups:
            for name, param in zip(group["names"], group["params"], strict=True):
                if param.grad is not None:
                    self._move(name, param, group)

    def _move(self, name: str, param: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state.update(new_state(param, group, 0))
        state["step"] += 1
        step, place = int(state["step"]), self._places[name]
        assert param.grad is not None, "`step` asks for those that have one"
        part = held(param, place)
        weight, offsets = part.tensor, part.offsets
        grad, m, v = (held(each, place).tensor for each in (param.grad, state["exp_avg"], state["exp_avg_sq"]))
        (beta1, beta2), lr = group["betas"], group["lr"]
        bias1, bias2 = 1.0 - beta1**step, 1.0 - beta2**step
        for chunk, start in _chunks(weight, offsets):
            w = weight[chunk]
            size, device = tuple(w.shape), w.device
            drawn = box_words(self._seed, f"rounding/{name}/{step}", part.shape, start, size, device=device)
            m32 = m[chunk].float().lerp_(grad[chunk], 1.0 - beta1)
            v32 = v[chunk].float().mul_(beta2).addcmul_(grad[chunk], grad[chunk], value=1.0 - beta2)
            w.mul_(1.0 - lr * group["weight_decay"])
            w.addcdiv_(m32, v32.sqrt().div_(math.sqrt(bias2)).add_(group["eps"]), value=-lr / bias1)
            m[chunk] = round_stochastically(m32, drawn & 0xFFFF)
            v[chunk] = round_stochastically(v32, drawn >> 16)


def new_state(param: torch.Tensor, group: dict[str, Any], num_steps: int) -> dict[str, torch.Tensor]:
    """Moments of a parameter as zeros, and its count of steps.

    Args:
        param: sharded or not.
        group: of the optimizer; `state_dtype` and `fused` are read, where there are any.
        num_steps: already taken.

    Returns:
        The state.
    """
    # torch keeps the count as a float32 scalar, on the parameter's device only when fused.
    device = param.device if group.get("fused") else "cpu"
    dtype = group.get("state_dtype", param.dtype)
    return {
        "step": torch.tensor(float(num_steps), dtype=torch.float32, device=device),
        "exp_avg": torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format),
        "exp_avg_sq": torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format),
    }


def _chunks(local: torch.Tensor, offsets: tuple[int, ...]) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """Runs of a part along its first dim, each with its offsets in the logical tensor."""
    if local.numel() == 0:
        return
    most = _CHUNK_ELEMENTS.get(local.device.type, _CHUNK_ELEMENTS_ELSEWHERE)
    length = max(1, most // math.prod(local.shape[1:]))
    for first in range(0, local.shape[0], length):
        yield (slice(first, first + length),), (offsets[0] + first, *offsets[1:])
