"""Names of what a step computes, that no layout changes, and the order in which a step computes it. Pure.

    2/gradient/layers.0.mlp.up_proj.weight          step / kind / logical name
    2/forward/embedding#1                           the second time that it runs in a micro-batch

Order is that of the flow of data: weights as they were, the forward, what is computed again, the loss, then from the
loss backwards each module's gradient of its output before the gradients of its parameters, the norm, and the new state.
"""

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any

INIT, FORWARD, ROUTER, CHOICE, RECOMPUTE, LOSS, ROUTING = (
    "init",
    "forward",
    "router",
    "choice",
    "recompute",
    "loss",
    "routing",
)
BACKWARD, GRADIENT, NORM, OPTIMIZER, WEIGHT = "backward", "gradient", "norm", "optimizer", "weight"

KINDS = (INIT, FORWARD, ROUTER, CHOICE, RECOMPUTE, LOSS, ROUTING, BACKWARD, GRADIENT, NORM, OPTIMIZER, WEIGHT)
"""`init`: weights and optimizer states before the first step that is recorded. `forward`: outputs of modules.
`router`: logits over experts. `choice`: the experts of each token, ascending. `recompute`: outputs that activation
checkpointing computes again. `routing`: how often each expert was chosen. `backward`: gradients of outputs. `gradient`:
of parameters, summed over ranks, before clipping. `optimizer`: moments. `weight`: after the step.
"""

_PHASES = ((INIT,), (FORWARD, ROUTER, CHOICE), (RECOMPUTE,), (LOSS,), (ROUTING,), (BACKWARD, GRADIENT), (NORM,))
_PHASE = {kind: at for at, kinds in enumerate((*_PHASES, (OPTIMIZER,), (WEIGHT,))) for kind in kinds}
_FROM_THE_END = frozenset((BACKWARD, GRADIENT, OPTIMIZER, WEIGHT))

# In the order in which a decoder's forward uses them; words of different depths do not meet.
_WORDS = (
    "embedding layers norm output mtp embedding_norm hidden_norm merge_proj block attention_norm attention mlp_norm "
    "mlp q_proj q_a_proj q_a_norm q_b_proj kv_a_proj kv_a_norm kv_b_proj k_proj v_proj q_norm k_norm o_proj "
    "router gate_proj up_proj down_proj experts shared shared_gate weight bias load exp_avg exp_avg_sq"
)
_WORD = {word: at for at, word in enumerate(_WORDS.split())}
_LAST = len(_WORD) + 1


def key(step: int, kind: str, name: str = "", occurrence: int = 0) -> str:
    """`step/kind/name`; steps count from 1, what was there before is step 0."""
    return f"{step}/{kind}/{name}#{occurrence}" if occurrence else f"{step}/{kind}/{name}"


def split_key(text: str) -> tuple[int, str, str]:
    """Step, kind and name of a key; the name keeps its occurrence."""
    step, kind, name = text.split("/", 2)
    return int(step), kind, name


def in_order(keys: Iterable[str]) -> list[str]:
    """Keys in the order in which steps compute them."""

    def rank(text: str) -> tuple:
        step, kind, name = split_key(text)
        place = _place(name)
        return step, _PHASE[kind], _Backwards(place) if kind in _FROM_THE_END else place, KINDS.index(kind)

    return sorted(keys, key=rank)


def _place(name: str) -> tuple[tuple[int, str], ...]:
    """Where a name stands in the forward: what a module gives comes after all that is in it."""
    name, _, occurrence = name.partition("#")
    words = [(int(word), "") if word.isdigit() else (_WORD.get(word, _LAST), word) for word in name.split(".")]
    return (*words, (_LAST + 1, ""), (int(occurrence or 0), ""))


def depth(name: str, *, backwards: bool = False) -> Any:
    """Where the block that a module lies in stands in the flow of data; what lies in one block compares equal.

    Args:
        name: logical name of a module.
        backwards: from the loss backwards.

    Returns:
        What compares in that order.
    """
    place = _place(".".join(name.partition("#")[0].split(".")[:2]))
    return _Backwards(place) if backwards else place


class _Backwards:
    """Compares as its value does, the other way round."""

    def __init__(self, value: tuple):
        self._value = value

    def __lt__(self, other: "_Backwards") -> bool:
        return other._value < self._value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Backwards) and self._value == other._value


def is_wanted(name: str, patterns: Sequence[str]) -> bool:
    """Whether a logical name, or a module that it lies in, matches one of the patterns; all do where there are none."""
    if not patterns or not name:
        return True
    words = name.partition("#")[0].split(".")
    within = [".".join(words[:count]) for count in range(1, len(words) + 1)]
    return any(fnmatchcase(outer, pattern) for pattern in patterns for outer in within)
