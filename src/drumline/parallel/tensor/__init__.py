"""Tensor parallelism: the matmuls of a decoder shared out over the ranks of one group, and the tokens between them.

In: a decoder whose parameters are cut (`drumline.parallel.plan`), its places, the mesh. Out: the same decoder, whose
    parts communicate where they meet.
"""

from drumline.parallel.tensor.apply import spread_matmuls

__all__ = ["spread_matmuls"]
