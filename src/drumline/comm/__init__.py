"""Joining the world of ranks: who this process is, which device it has, the scalars that all ranks agree on; and sums
of tensors in the order of a tree.

In: the environment and a timeout; tensors. Out: a `World`; their sums. Nothing here knows models or layouts.
"""

from drumline.comm.environment import Place, read_num_threads, read_place
from drumline.comm.passing import Passing
from drumline.comm.tree_reduce import Owners, gather_pieces, tree_all_reduce, tree_reduce_scatter
from drumline.comm.world import World, choose_device, join, leave, longest_wait

__all__ = [
    "Owners",
    "Passing",
    "Place",
    "World",
    "choose_device",
    "gather_pieces",
    "join",
    "leave",
    "longest_wait",
    "read_num_threads",
    "read_place",
    "tree_all_reduce",
    "tree_reduce_scatter",
]
