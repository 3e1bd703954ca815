"""Own CPU kernels in C++, optional at run time.

In: plain torch tensors in fp32 or bf16. Out: the mathematics of torch's operators, faster, with bits that do not
depend on batch, later tokens or threads. `available()` says whether they run here; callers fall back to torch's own
operators.
"""

from drumline.numerics.kernels.attention import attention, available, reason

__all__ = ["attention", "available", "reason"]
