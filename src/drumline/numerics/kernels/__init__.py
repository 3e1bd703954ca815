"""Own CPU kernels in C++, optional at run time.

In: plain torch tensors in fp32 or bf16. Out: the mathematics of torch's operators, faster, with bits that do not
depend on batch, later tokens or threads. `available()` says whether they run here; callers fall back to torch's own.
"""

from drumline.numerics.kernels.causal_attention import attention
from drumline.numerics.kernels.choice import available, reason, take
from drumline.numerics.kernels.hashing import hash_bits
from drumline.numerics.kernels.layers import rms_norm, swiglu
from drumline.numerics.kernels.loss import cross_entropy_

__all__ = ["attention", "available", "cross_entropy_", "hash_bits", "reason", "rms_norm", "swiglu", "take"]
