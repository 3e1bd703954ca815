"""Single-device model code: Llama 3, Qwen3 and DeepSeek-V3, their attention, experts, loss and initial weights.

In: the recipe's model section, tokens, document starts, labels. Out: logits, or the summed loss. Knows nothing of
parallelism.
"""

from drumline.models.attention import Attend, select
from drumline.models.decoder import Block, Decoder, build
from drumline.models.initialize import initialize
from drumline.models.invariant import TABLES, InvariantAttend, invariant_cross_entropy, make_invariant
from drumline.models.loss import CrossEntropy, chunked_cross_entropy
from drumline.models.moe import Dispatch, Routed, update_balance
from drumline.models.part import Layers, Part
from drumline.models.rope import Rope

__all__ = [
    "TABLES",
    "Attend",
    "Block",
    "CrossEntropy",
    "Decoder",
    "Dispatch",
    "InvariantAttend",
    "Layers",
    "Part",
    "Rope",
    "Routed",
    "build",
    "chunked_cross_entropy",
    "initialize",
    "invariant_cross_entropy",
    "make_invariant",
    "select",
    "update_balance",
]
