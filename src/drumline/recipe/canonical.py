"""One spelling of a recipe: flat by key, as TOML, and as a digest of what defines the maths of its run.

Two runs with the same `digest` compute the same thing up to rounding: neither the layout, nor how the batch is cut into
micro-batches, nor what is kept in memory changes what is computed.
"""

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from drumline.recipe.keys import is_within
from drumline.recipe.problem import ABSENT
from drumline.recipe.sections import Recipe

# Keys that leave the maths alone; every other key defines it. A whole section is named by its name.
NOT_MATHS = frozenset(
    {
        "name",
        "model.max_seq_len",  # a limit for validation
        "model.attention",  # how, not what
        "data.cache_dir",
        "data.micro_batch",  # gradients are normalized by the global batch
        "data.num_workers",
        "data.prefetch",
        "optimizer.implementation",
        "layout",
        "memory",
        "numerics.deterministic",
        "numerics.invariant",  # how, not what
        "checkpoint",
        "resilience",
        "metrics",
        "run.name",
        "run.dir",
        "run.device",
        "run.stop_after",
        "run.threads",
        "run.compile",
        "run.validate_every",
        "run.validation_batches",
        "run.profile",
        "run.timeline",
    }
)

# Keys that are younger than digests that were written down: at this value a recipe says what it said without the key.
ADDED_LATER = {
    "model.moe": None,
    "model.yarn": None,
    "model.mla": None,
    "model.dropout": 0.0,
    "model.num_mtp_layers": 0,
    "model.mtp_loss_weight": 0.3,
    "optimizer.state_dtype": "fp32",
    "numerics.deterministic": True,
    "resilience.replay_every": 0,
    "run.stop_after": 0,
    "metrics.expert_load_every": 1,
    "numerics.lanes": 0,
    "numerics.blocks": 1,
    "numerics.invariant": False,
}

EXACT_MATHS = frozenset(
    {"data.micro_batch", "memory.loss_chunk_tokens", "model.attention", "optimizer.implementation", "run.threads"}
)
"""Keys that move bits and nothing else, so that they define the maths of a run in exact mode only."""


def is_maths(key: str, *, exact: bool = False) -> bool:
    """Whether a dotted key defines the maths of a run, in exact mode to the last bit."""
    if exact and key in EXACT_MATHS:
        return True
    return key not in NOT_MATHS and key.split(".")[0] not in NOT_MATHS


def flat(recipe: Recipe | dict[str, Any]) -> dict[str, Any]:
    """Every value of a recipe by its dotted key.

    Args:
        recipe: the recipe, or its JSON values as another version of drumline may have written them.

    Returns:
        Dotted key -> value; an element of a list is named by its number. Keys that are younger than the values are
        there with what the values said without them.
    """
    if isinstance(recipe, Recipe):
        return dict(_flatten(recipe.model_dump(mode="json"), ""))
    found = dict(_flatten(recipe, ""))
    younger = {key: old for key, old in ADDED_LATER.items() if not any(is_within(name, key) for name in found)}
    return found | younger


def _flatten(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list) and value:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for name, inner in pairs:
            yield from _flatten(inner, f"{key}.{name}" if key else str(name))
    else:
        yield key, value


def digest(recipe: Recipe) -> str:
    """A hash of what defines the maths of a run.

    Args:
        recipe: the recipe.

    Returns:
        SHA-256 in hex; equal for recipes that differ only in keys of `NOT_MATHS`, which in exact mode leave out
        `EXACT_MATHS`.
    """
    return _hash(
        {key: value for key, value in flat(recipe).items() if is_maths(key, exact=recipe.numerics.mode == "exact")}
    )


def full_digest(recipe: Recipe) -> str:
    """A hash of every value of a recipe, as SHA-256 in hex."""
    return _hash(flat(recipe))


def _hash(values: dict[str, Any]) -> str:
    values = {key: value for key, value in values.items() if ADDED_LATER.get(key, ABSENT) != value}
    return hashlib.sha256(json.dumps(values, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def to_toml(recipe: Recipe) -> str:
    """A recipe as TOML, every key written out, in the order of the sections.

    Args:
        recipe: the recipe.

    Returns:
        Text that `load` reads back into an equal recipe.
    """
    return "\n".join(_table(recipe.model_dump(), "")) + "\n"


def _table(table: dict[str, Any], key: str) -> Iterator[str]:
    inner = {name: value for name, value in table.items() if isinstance(value, dict)}
    for name, value in table.items():
        if name not in inner and value is not None:
            yield f"{name} = {_value(value)}"
    for name, value in inner.items():
        path = f"{key}.{name}".lstrip(".")
        yield ""
        yield f"[{path}]"
        yield from _table(value, path)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return '"' + "".join(map(_letter, value)) + '"'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(_value(element) for element in value) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{name} = {_value(inner)}" for name, inner in value.items()) + " }"
    return repr(value)


def _letter(letter: str) -> str:
    if letter in '"\\':
        return "\\" + letter
    return letter if letter.isprintable() else f"\\U{ord(letter):08x}"
