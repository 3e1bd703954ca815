"""SwiGLU that stays in blocks from its first product to its last.

C chunks, b blocks of this rank, R rows of a chunk, F hidden width of a block.
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
        gate_CbRF, up_CbRF = project_blocks(x_BTD, (layer.gate_proj, layer.up_proj), self._pieces)
        return merge_blocks(swiglu(gate_CbRF, up_CbRF), layer.down_proj, len(x_BTD), self._pieces)
