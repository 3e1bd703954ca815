"""Expert parallelism: what carries tokens between the ranks that share out a layer's experts.

In: the mesh. Out: a dispatcher for `models.build`, and the experts' own way to be sharded.
"""

from drumline.parallel.expert.dispatch import dispatch_over, expert_dispatch
from drumline.parallel.expert.shard import shard_experts

__all__ = ["dispatch_over", "expert_dispatch", "shard_experts"]
