"""The invariant operators on GPUs: Triton kernels with one order of additions each.

In: contiguous or strided tensors of one device, in fp32 or bf16. Out: what the operators of the room above give for
them. Nothing here is imported before a CUDA tensor is met, since Triton is optional; and no kernel is tuned by what it
is given, since a tile that changes with the batch would change bits with it.
"""

__all__: list[str] = []
