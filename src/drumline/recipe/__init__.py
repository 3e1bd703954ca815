"""The typed recipe, the layout, model shapes and their validation.

In: TOML, overrides. Out: a frozen `Recipe`, or every problem with it at once. Imports no torch.
"""

from drumline.recipe.canonical import digest, flat, full_digest, is_maths, to_toml
from drumline.recipe.comparison import Difference, diff
from drumline.recipe.errors import CheckFailed, DrumlineError, RecipeError
from drumline.recipe.files import builtin_names
from drumline.recipe.json_schema import schema
from drumline.recipe.layout import Layout
from drumline.recipe.loading import load
from drumline.recipe.problem import ABSENT, Problem
from drumline.recipe.rules import Machine
from drumline.recipe.sections import Recipe
from drumline.recipe.shapes import num_active_parameters, num_parameters, parameter_shapes
from drumline.recipe.validation import check, problems

__all__ = [
    "ABSENT",
    "CheckFailed",
    "Difference",
    "DrumlineError",
    "Layout",
    "Machine",
    "Problem",
    "Recipe",
    "RecipeError",
    "builtin_names",
    "check",
    "diff",
    "digest",
    "flat",
    "full_digest",
    "is_maths",
    "load",
    "num_active_parameters",
    "num_parameters",
    "parameter_shapes",
    "problems",
    "schema",
    "to_toml",
]
