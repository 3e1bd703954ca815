"""SwiGLU that stays in chunks from its first product to its last.

C chunks, R rows of a chunk, F hidden width of this rank.
"""

import torch

from drumline.models.layers import FeedForward
from drumline.numerics.exact import swiglu
from drumline.parallel.exact.linear import merge_blocks, project_blocks
from drumline.parallel.exact.pieces import Pieces


class ExactFeedForward:
    """The forward of a dense feed-forward.

    Args:
        layer: its weights are this rank's.
        pieces: of this rank.
    """

    def __init__(self, layer: FeedForward, pieces: Pieces):
        self._layer = layer
        self._pieces = pieces

    def __call__(self, x_BTD: torch.Tensor) -> torch.Tensor:
        layer = self._layer
        gate_CRF, up_CRF = project_blocks(x_BTD, (layer.gate_proj, layer.up_proj), self._pieces)
        return merge_blocks(swiglu(gate_CRF, up_CRF), layer.down_proj, len(x_BTD), self._pieces)
