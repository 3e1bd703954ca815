"""The mesh, one module for each way to split the work, and the one place that applies them in order.

In: a model on meta, a recipe, a joined world. Out: the same model spread over the ranks, and what brings its
    gradients to their sum.
"""

from drumline.parallel.apply import own_gradients, parallelize
from drumline.parallel.gradients import Gradients, layers_of
from drumline.parallel.mesh import Mesh, build_mesh
from drumline.parallel.place import Place, Places, clear_padding, held, holder, to_local
from drumline.parallel.shard import free_gathered

__all__ = [
    "Gradients",
    "Mesh",
    "Place",
    "Places",
    "build_mesh",
    "clear_padding",
    "free_gathered",
    "held",
    "holder",
    "layers_of",
    "own_gradients",
    "parallelize",
    "to_local",
]
