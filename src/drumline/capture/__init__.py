"""Numerics by logical name: records what steps compute in any layout, reads it back as logical tensors, compares it.

In: a model in its layout, and the steps of its training. Out: captures; differences between two; verdicts of gates.
"""

from drumline.capture.recorder import Recorder
from drumline.capture.sink import LEVELS, OPS
from drumline.capture.snapshot import Subject
from drumline.capture.tokens import Tokens, tokens_of

__all__ = ["LEVELS", "OPS", "Recorder", "Subject", "Tokens", "tokens_of"]
