"""Joining the world of ranks: who this process is, which device it has, and the scalars that all ranks agree on.

In: the environment and a timeout. Out: a `World`. Nothing here knows models or layouts.
"""

from drumline.comm.environment import Place, read_num_threads, read_place
from drumline.comm.passing import Passing
from drumline.comm.world import World, choose_device, join, leave, longest_wait

__all__ = [
    "Passing",
    "Place",
    "World",
    "choose_device",
    "join",
    "leave",
    "longest_wait",
    "read_num_threads",
    "read_place",
]
