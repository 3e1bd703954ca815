"""Rules of latent attention, of YaRN and of multi-token prediction.

Source: DeepSeek-V3, arXiv:2412.19437, sections 2.1.1 and 2.2.
"""

from collections.abc import Iterator

from drumline.recipe.problem import Problem, problem
from drumline.recipe.rules.machine import Machine
from drumline.recipe.sections import Recipe

_FAMILY = "deepseek_v3"


def latent_attention_fits_family(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """DeepSeek-V3 has latent attention, and no other family has."""
    model = recipe.model
    if model.mla is not None and model.family != _FAMILY:
        rule = f"has no latent attention, but model.mla is given; only {_FAMILY} has"
        yield problem(recipe, "model-mla-family", "model.family", rule, [_FAMILY])
    elif model.mla is None and model.family == _FAMILY:
        rule = "has latent attention, but model.mla is absent"
        yield problem(recipe, "model-mla-family", "model.family", rule, ["llama3"], "model.mla.kv_lora_rank=64")


def head_dim_is_that_of_latent_attention(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """A query or key head is its part without position and its rotated part."""
    mla = recipe.model.mla
    if mla is None:
        return
    width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    if recipe.model.head_dim != width:
        rule = (
            f"is not {width}, model.mla.qk_nope_head_dim = {mla.qk_nope_head_dim} + qk_rope_head_dim = "
            f"{mla.qk_rope_head_dim}"
        )
        yield problem(recipe, "model-mla-head-dim", "model.head_dim", rule, [width])


def latent_parts_are_even(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Both parts of a head are laid out as pairs, of which RoPE turns some."""
    mla = recipe.model.mla
    if mla is None:
        return
    for name in ("qk_nope_head_dim", "qk_rope_head_dim"):
        width = getattr(mla, name)
        if width % 2:
            near = [n for n in (width - 1, width + 1) if n > 0]
            rule = "is odd, but a head is pairs, of which rotary embedding turns some"
            yield problem(recipe, "model-mla-even", f"model.mla.{name}", rule, near)


def values_are_no_wider_than_keys(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Values are brought to the width of keys, which attention kernels want of both."""
    mla = recipe.model.mla
    if mla is None:
        return
    width = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    if mla.v_head_dim > width:
        rule = f"is more than the {width} of a key head, to which values are filled up"
        yield problem(recipe, "model-mla-value-width", "model.mla.v_head_dim", rule, [width])


def latent_attention_shares_no_keys(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Every query head makes keys and values of its own from the latent."""
    model = recipe.model
    if model.mla is not None and model.num_kv_heads != model.num_heads:
        rule = f"is not model.num_heads = {model.num_heads}: under model.mla every head has its own keys and values"
        yield problem(recipe, "model-mla-kv-heads", "model.num_kv_heads", rule, [model.num_heads])


def yarn_scales_latent_attention(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """YaRN, as it is done here, also scales the softmax, which only DeepSeek-V3 does."""
    if recipe.model.yarn is not None and recipe.model.mla is None:
        rule = "scales the softmax of latent attention, but model.mla is absent"
        yield problem(recipe, "model-yarn-mla", "model.yarn", rule, ["none"])


def yarn_bounds_are_ordered(recipe: Recipe, machine: Machine) -> Iterator[Problem]:
    """Frequencies are interpolated between the two bounds."""
    yarn = recipe.model.yarn
    if yarn is not None and yarn.beta_slow >= yarn.beta_fast:
        rule = f"must be less than model.yarn.beta_fast = {yarn.beta_fast}"
        yield problem(recipe, "model-yarn-order", "model.yarn.beta_slow", rule, [yarn.beta_fast / 32])


LATENT_RULES = (
    latent_attention_fits_family,
    head_dim_is_that_of_latent_attention,
    latent_parts_are_even,
    values_are_no_wider_than_keys,
    latent_attention_shares_no_keys,
    yarn_scales_latent_attention,
    yarn_bounds_are_ordered,
)
