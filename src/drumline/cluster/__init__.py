"""What runs are on: accelerators today; links, topologies and the placement of ranks later. Imports no torch.

In: names. Out: frozen tables of published figures with their sources.
"""

from drumline.cluster.accelerators import ACCELERATORS, Accelerator, accelerator_names, find, recognize

__all__ = ["ACCELERATORS", "Accelerator", "accelerator_names", "find", "recognize"]
