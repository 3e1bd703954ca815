"""The typed recipe, the layout, model shapes and their validation.

In: TOML, overrides. Out: a frozen `Recipe`, or every problem with it at once. Imports no torch.
"""

from drumline.recipe.layout import Layout
from drumline.recipe.sections import Recipe

__all__ = ["Layout", "Recipe"]
