"""drumline trains language models across many accelerators and proves that what it trained is what was asked for.

Importing this package loads no room: `from drumline.recipe import load` and so on name what they need.
"""

__version__ = "0.1.0"
__all__ = ["__version__"]
