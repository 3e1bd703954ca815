"""Numbers that do not depend on who computes them: counter-based randomness, own kernels, fixed-order reductions.

In: seeds, names, logical element indices; tensors. Out: tensors whose bits are a function of those alone.
"""

__all__: list[str] = []
