"""Rules of the model's shape and of its family.

Source: the `transformers` configurations of Llama 3 and Qwen3, which a checkpoint is exported to.
"""

from collections.abc import Iterator

from drumline.recipe.nearest import nearest_divisors
from drumline.recipe.problem import Problem, problem
from drumline.recipe.rules.machine import Machine
from drumline.recipe.sections import Recipe


def head_dim_is_even(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """RoPE turns pairs, so a head's width is even."""
    width = recipe.model.head_dim
    if width % 2:
        rule = "is odd, but rotary embedding turns pairs of a head's elements"
        yield problem(
            recipe, "model-head-dim-even", "model.head_dim", rule, [n for n in (width - 1, width + 1) if n > 0]
        )


def kv_heads_divide_heads(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Each key/value head serves the same number of query heads."""
    heads, kv_heads = recipe.model.num_heads, recipe.model.num_kv_heads
    if heads % kv_heads:
        rule = f"does not divide model.num_heads = {heads}, so query heads cannot share key and value heads evenly"
        yield problem(recipe, "model-kv-heads", "model.num_kv_heads", rule, nearest_divisors(heads, kv_heads))


def qk_norm_fits_family(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Qwen3 norms its queries and keys, Llama 3 does not."""
    family, qk_norm = recipe.model.family, recipe.model.qk_norm
    if qk_norm != (family == "qwen3"):
        rule = (
            f"contradicts model.family = {family}, which {'has' if family == 'qwen3' else 'has no'} query and key norms"
        )
        yield problem(recipe, "model-qk-norm", "model.qk_norm", rule, [not qk_norm])


def rope_scaling_fits_family(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """The scaling of rotary frequencies is Llama 3.1's own."""
    if recipe.model.rope_scaling is not None and recipe.model.family != "llama3":
        rule = f"is Llama 3.1's frequency scaling, which model.family = {recipe.model.family} does not have"
        yield problem(recipe, "model-rope-scaling-family", "model.rope_scaling", rule, ["none"])


def rope_scaling_factors_are_ordered(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Frequencies are interpolated between the two factors, so the low one is lower."""
    scaling = recipe.model.rope_scaling
    if scaling is not None and scaling.low_freq_factor >= scaling.high_freq_factor:
        rule = f"must be less than model.rope_scaling.high_freq_factor = {scaling.high_freq_factor}"
        key = "model.rope_scaling.low_freq_factor"
        yield problem(recipe, "model-rope-scaling-order", key, rule, [scaling.high_freq_factor / 4])


MODEL_RULES = (
    head_dim_is_even,
    kv_heads_divide_heads,
    qk_norm_fits_family,
    rope_scaling_fits_family,
    rope_scaling_factors_are_ordered,
)
