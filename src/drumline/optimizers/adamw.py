"""AdamW with decoupled decay of matrices only, and clipping by the global norm.

Sources: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2; clipping, Pascanu et al. 2013, arXiv:1211.5063,
algorithm 1.
"""

from collections.abc import Iterable

import torch
from torch import nn

from drumline.recipe.sections import Optimizer

_PIECE = 1 << 14


def build_adamw(model: nn.Module, section: Optimizer, *, exact: bool = False) -> torch.optim.AdamW:
    """Builds torch's AdamW over a model whose parameters are real (or sharded) tensors.

    Args:
        model: norm weights (1-d) get no decay, matrices do.
        section: hyper-parameters and which implementation.
        exact: an element's bits are not to depend on how its tensor is cut. The fused implementation computes the last
            elements of a tensor otherwise than the rest; foreach is made of operators that do not.

    Returns:
        The optimizer, without states yet.
    """
    fused = section.implementation == "fused" or (section.implementation == "auto" and not exact)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        foreach=not fused,
        fused=fused,
    )


def materialize_states(optimizer: torch.optim.AdamW, num_steps: int) -> None:
    """Creates the moments as zeros and sets the step count, so that a checkpoint can be read into them.

    Args:
        optimizer: as `build_adamw` made it.
        num_steps: optimizer steps already taken.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            # torch keeps the count as a float32 scalar, on the parameter's device only when fused.
            device = param.device if group["fused"] else "cpu"
            optimizer.state[param] = {
                "step": torch.tensor(float(num_steps), dtype=torch.float32, device=device),
                "exp_avg": torch.zeros_like(param, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(param, memory_format=torch.preserve_format),
            }


def local_sum_of_squares(grads: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of squares of the gradients that this rank counts.

    Args:
        grads: any shapes, one device; there may be none.

    Returns:
        Scalar, fp64.
    """
    pieces = [piece for grad in grads for piece in _short_pieces(grad)]
    if not pieces:
        return torch.zeros((), dtype=torch.float64)
    norms = torch._foreach_norm(pieces)  # pyright: ignore[reportPrivateImportUsage]
    return torch.stack(norms).double().square().sum()


def _short_pieces(grad: torch.Tensor) -> Iterable[torch.Tensor]:
    # A CPU adds squares in fp32 one after the other: over 6 million elements the norm was off by 2e-4, over these
    # pieces
    # by 2e-8, for one more millisecond. CUDA adds in a tree.
    return grad.reshape(-1).split(_PIECE) if grad.device.type == "cpu" else (grad,)


def clip(grads: Iterable[torch.Tensor], norm: float, max_norm: float) -> None:
    """Scales gradients, of which a rank may have none, in place to a global norm of at most `max_norm`; 0: never."""
    scaled = list(grads)
    if scaled and max_norm > 0 and norm > max_norm:  # torch refuses an empty list
        torch._foreach_mul_(scaled, max_norm / norm)  # pyright: ignore[reportPrivateImportUsage]
