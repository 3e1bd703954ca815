"""AdamW of which an element's bits do not depend on how its tensor is cut over ranks."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from drumline.numerics.invariant.native import library
from drumline.numerics.kernels import adamw
from drumline.optimizers.low_bit import new_state


class ExactAdamW(torch.optim.AdamW):
    """torch's AdamW whose step is one pass of a C++ kernel where that runs: for fp32 on CPU.

    Elsewhere torch's operators run one after the other, which compute every element alike, too. Arguments and states
    are those of torch, `foreach` made of them.
    """

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Moves every parameter that has a gradient.

        Args:
            closure: none is taken.

        Raises:
            ValueError: a closure was given.
        """
        if closure is not None:
            raise ValueError("ExactAdamW takes no closure: gradients are there when it steps")
        moving = [(param, group) for group in self.param_groups for param in group["params"] if param.grad is not None]
        if not all(_fits(param) for param, _ in moving):
            super().step()
            return
        for param, group in moving:
            self._move(param, group)

    def _move(self, param: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state.update(new_state(param, group, 0))
        state["step"] += 1
        weight, grad, first, second = map(_local, (param, param.grad, state["exp_avg"], state["exp_avg_sq"]))
        built = library(adamw, weight)
        assert built is not None, "`step` asks"
        how = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
        adamw.adamw_(built, weight, grad.contiguous(), first, second, int(state["step"]), **how)


def _fits(param: torch.Tensor) -> bool:
    weight, grad = _local(param), _local(param.grad)
    is_plain = weight.dtype == grad.dtype == torch.float32 and weight.is_contiguous()
    return is_plain and library(adamw, weight) is not None


def _local(tensor: torch.Tensor | None) -> torch.Tensor:
    assert tensor is not None
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
