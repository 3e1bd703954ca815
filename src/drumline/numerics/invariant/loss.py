"""Cross-entropy of rows of logits, whose bits depend on the row alone.

loss = log sum_v exp(l_v) - l_label          dl = softmax(l) - onehot(label)
"""

import torch
from torch import Tensor

from drumline.numerics.invariant import plain
from drumline.numerics.invariant.native import as_wide, gpu, library, like, operator
from drumline.numerics.kernels import loss as native


def cross_entropy(logits_NV: Tensor, labels_N: Tensor, ignored: int = -100) -> Tensor:
    """The loss of each row.

    Args:
        logits_NV: any float dtype.
        labels_N: int64, in [0, V) or `ignored`.
        ignored: the label whose loss and gradient are zero.

    Returns:
        losses_N in fp32 at least, differentiable in the logits. `drumline.numerics.invariant.sum` adds them.

    Raises:
        IndexError: a label is neither `ignored` nor in [0, V).
    """
    return _CrossEntropy.apply(logits_NV, labels_N, ignored)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, ignored):
        losses, gradient = cross_entropy_with_gradient(logits, labels, ignored)
        ctx.save_for_backward(gradient)
        return losses

    @staticmethod
    def backward(ctx, *grad_outputs):
        (gradient,) = ctx.saved_tensors
        return (gradient * grad_outputs[0][:, None]).to(gradient.dtype), None, None


def _run(logits: Tensor, labels: Tensor, ignored: int) -> tuple[Tensor, Tensor]:
    kernels = gpu("loss", logits)
    built = None if kernels else library(native, logits)
    if built is not None:
        gradient = logits.clone(memory_format=torch.contiguous_format)
        return native.run(built, gradient, labels, ignored, with_gradient=True), gradient
    counts = labels != ignored
    num_bad = int((counts & ((labels < 0) | (labels >= logits.shape[-1]))).sum())
    if num_bad:
        raise IndexError(f"{num_bad} labels lie outside the vocabulary of {logits.shape[-1]} and are not {ignored}")
    if kernels is not None:
        return kernels.cross_entropy(logits, labels, ignored)
    log_probability = plain.softmax(plain.wide(logits), is_log=True)
    chosen = labels.where(counts, 0)[:, None]
    losses = -log_probability.gather(1, chosen)[:, 0] * counts
    gradient = log_probability.exp()
    gradient.scatter_(1, chosen, gradient.gather(1, chosen) - 1)
    return losses, (gradient * counts[:, None]).to(logits.dtype)


cross_entropy_with_gradient = operator(
    "invariant_cross_entropy(Tensor logits, Tensor labels, int ignored) -> (Tensor, Tensor)",
    _run,
    lambda logits, labels, ignored: (as_wide(logits, labels.shape), like(logits)),
)
