"""AdamW with decoupled decay of matrices only, and clipping by the global norm.

Sources: Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2; clipping, Pascanu et al. 2013, arXiv:1211.5063,
algorithm 1.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from drumline.optimizers.exact import ExactAdamW
from drumline.optimizers.low_bit import LowBitAdamW, new_state
from drumline.parallel import Places
from drumline.recipe.sections import Optimizer

_PIECE = 1 << 14


def build_adamw(
    model: nn.Module, section: Optimizer, places: Places, seed: int, *, exact: bool = False
) -> torch.optim.Optimizer:
    """Builds AdamW over a model whose parameters are real (or sharded) tensors: torch's, or the one with bf16 states.

    Args:
        model: norm weights (1-d) get no decay, matrices do.
        section: hyper-parameters and which implementation.
        places: of the parameters, by logical name; read for bf16 states.
        seed: of the run; likewise.
        exact: an element's bits are not to depend on how its tensor is cut. The fused implementation computes the last
            elements of a tensor otherwise than the rest; foreach is made of operators that do not, and has a kernel.

    Returns:
        The optimizer, without states yet.
    """
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    matrices = {name: param for name, param in trained.items() if param.ndim >= 2}
    others = {name: param for name, param in trained.items() if param.ndim < 2}
    groups = [_group(matrices, section.weight_decay), _group(others, 0.0)]
    groups = [group for group in groups if group["params"]]
    if section.state_dtype == "bf16":
        betas = (section.beta1, section.beta2)
        return LowBitAdamW(groups, places=places, seed=seed, lr=section.lr, betas=betas, eps=section.eps)
    fused = section.implementation == "fused" or (section.implementation == "auto" and not exact)
    # Asked for by name, foreach is torch's.
    of_torch = not exact or section.implementation != "auto"
    return (torch.optim.AdamW if of_torch else ExactAdamW)(
        groups,
        lr=section.lr,
        betas=(section.beta1, section.beta2),
        eps=section.eps,
        foreach=not fused,
        fused=fused,
    )


def _group(named: dict[str, nn.Parameter], weight_decay: float) -> dict[str, Any]:
    return {"params": list(named.values()), "names": tuple(named), "weight_decay": weight_decay}


def materialize_states(optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Creates the moments as zeros and sets the step count, so that a checkpoint can be read into them.

    Args:
        optimizer: as `build_adamw` made it.
        num_steps: optimizer steps already taken.
    """
    for group in optimizer.param_groups:
        for param in group["params"]:
            optimizer.state[param] = new_state(param, group, num_steps)


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
