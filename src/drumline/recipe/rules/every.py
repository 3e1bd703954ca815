"""Every rule, in the order of the sections."""

from drumline.recipe.rules.batches import BATCH_RULES
from drumline.recipe.rules.exact import EXACT_RULES
from drumline.recipe.rules.experts import EXPERT_RULES
from drumline.recipe.rules.invariant import INVARIANT_RULES
from drumline.recipe.rules.latent import LATENT_RULES
from drumline.recipe.rules.machine import MACHINE_RULES
from drumline.recipe.rules.model import MODEL_RULES
from drumline.recipe.rules.pieces import blocks_are_for_exact_mode
from drumline.recipe.rules.pipeline import PIPELINE_RULES
from drumline.recipe.rules.replay import REPLAY_RULES
from drumline.recipe.rules.spread import SPREAD_RULES

RULES = (
    *MODEL_RULES,
    *LATENT_RULES,
    *EXPERT_RULES,
    *BATCH_RULES,
    *SPREAD_RULES,
    *PIPELINE_RULES,
    blocks_are_for_exact_mode,
    *EXACT_RULES,
    *REPLAY_RULES,
    *INVARIANT_RULES,
    *MACHINE_RULES,
)
