"""AdamW of which an element's bits do not depend on how its tensor is cut over ranks."""

import ctypes
from typing import Any

import torch

from drumline.numerics.invariant.native import library
from drumline.numerics.kernels import adamw
from drumline.optimizers.low_bit import new_state
from drumline.parallel import to_local


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
        moving = [
            (param, param.grad, group)
            for group in self.param_groups
            for param in group["params"]
            if param.grad is not None
        ]
        kernels = [kernel for param, grad, _ in moving if (kernel := _kernel(param, grad)) is not None]
        if len(kernels) < len(moving):
            super().step()
            return
        for kernel, (param, grad, group) in zip(kernels, moving, strict=True):
            self._move(kernel, param, grad, group)

    def _move(self, kernel: ctypes.CDLL, param: torch.Tensor, grad: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state.update(new_state(param, group, 0))
        state["step"] += 1
        weight, grad, first, second = map(to_local, (param, grad, state["exp_avg"], state["exp_avg_sq"]))
        how = {key: group[key] for key in ("lr", "betas", "eps", "weight_decay")}
        adamw.adamw_(kernel, weight, grad.contiguous(), first, second, int(state["step"]), **how)


def _kernel(param: torch.Tensor, grad: torch.Tensor) -> ctypes.CDLL | None:
    """What moves a parameter; None where torch does."""
    weight, grad = to_local(param), to_local(grad)
    is_plain = weight.dtype == grad.dtype == torch.float32 and weight.is_contiguous()
    return library(adamw, weight) if is_plain else None
