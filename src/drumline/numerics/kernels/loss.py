"""Cross-entropy on CPU that turns logits into their gradient in place: two passes over a row, no second copy.

    loss = log sum_v exp(l_v) - l_label          dl = softmax(l) - onehot(label)
torch keeps log-probabilities beside the logits and makes the gradient in three more passes. The C++ is in loss.cpp.
"""

import ctypes
import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from drumline.numerics.kernels.build import KernelError, load
from drumline.numerics.kernels.operators import define, mode, pointers, rows_and_width


def cross_entropy_(logits_CV: Tensor, labels_C: Tensor, ignored: int, with_gradient: bool) -> Tensor:
    """The loss of each row of logits; the logits become their gradient.

    Args:
        logits_CV: contiguous fp32 or bf16; overwritten if `with_gradient`.
        labels_C: int64, in [0, V) or `ignored`.
        ignored: the label that counts for nothing: loss and gradient are zero.
        with_gradient: whether to overwrite.

    Returns:
        losses_C in fp32.

    Raises:
        IndexError: a label is neither `ignored` nor in [0, V).
    """
    return _cross_entropy(logits_CV, labels_C, ignored, with_gradient)


def run(library: ctypes.CDLL, logits: Tensor, labels: Tensor, ignored: int, with_gradient: bool) -> Tensor:
    if not logits.is_contiguous():
        raise ValueError(f"cross_entropy_: logits must be contiguous, got strides {logits.stride()}")
    labels, losses = labels.contiguous(), torch.empty(labels.shape, dtype=torch.float32)
    bad = library.drumline_cross_entropy(
        *pointers(logits, labels, losses),
        *rows_and_width(logits),
        ctypes.c_int64(ignored),
        int(with_gradient),
        *mode(logits),
    )
    if bad:
        raise IndexError(f"{bad} labels lie outside the vocabulary of {logits.shape[-1]} and are not {ignored}")
    return losses


@functools.cache
def library() -> ctypes.CDLL:
    """The built library; raises KernelError where it cannot be had."""
    library = load("loss", check=_check)
    library.drumline_cross_entropy.restype = ctypes.c_int64
    return library


def _check(library: ctypes.CDLL) -> None:
    """Compare a fresh build with torch in fp64, so that a miscompiled kernel is never used."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn((20, 45), generator=generator)
    labels = torch.arange(20)
    with torch.enable_grad():
        wide = logits.double().requires_grad_()
        wanted = F.cross_entropy(wide, labels, reduction="none")
        wanted_grad = torch.autograd.grad(wanted.sum(), wide)[0]
    losses = run(library, logits, labels, -100, with_gradient=True)
    error = max((losses - wanted).abs().max().item(), (logits - wanted_grad).abs().max().item())
    if not error < 1e-5:
        raise KernelError(f"the built kernel of cross-entropy is wrong here: it differs from fp64 by {error:.1e}")


_cross_entropy = define(
    "cross_entropy_(Tensor(a!) logits, Tensor labels, int ignored, bool with_gradient) -> Tensor",
    lambda *inputs: run(library(), *inputs),
    lambda logits, labels, ignored, with_gradient: labels.new_empty(labels.shape, dtype=torch.float32),
)
