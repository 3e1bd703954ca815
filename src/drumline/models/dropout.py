"""Dropout of what a block adds to the residual stream, whose mask is a function of the token and not of who holds it.

    y = x * mask / p,   mask[n, d] = 1 with probability p = 1 - rate

Element d of token n of the run (sample times sequence length plus position) is kept where its random number is below p:
a function of the run's seed, the layer and the place in it, the token, and d. So the mask is the same whichever rank
computes it, in whatever micro-batch, and whether for the first time or again for activation checkpointing.
Source: Srivastava et al. 2014; on the residual branches, Radford et al. 2019 (GPT-2).

B sequences, S tokens of each that are here, D model width.
"""

from collections.abc import Callable

import torch
from torch import nn

from drumline.numerics.random import stream_number, token_halves

_LEVELS = 1 << 16
_CHUNK_ELEMENTS = {"cpu": 1 << 17}  # what is made of a chunk stays in a core's cache
_CHUNK_ELEMENTS_ELSEWHERE = 1 << 25


class Dropout(nn.Module):
    """Drops elements in training; the identity where no tokens are given.

    Args:
        rate: the share that is dropped, in [0, 1); it is held to a multiple of 2**-16.
        seed: of the run.
        stream: names the place in the model.
    """

    def __init__(self, rate: float, seed: int, stream: str):
        super().__init__()
        self.kept = max(1, round((1.0 - rate) * _LEVELS))
        self.seed = seed
        self.stream = stream_number(stream)
        self.own: Callable[[torch.Tensor], torch.Tensor] = _all

    def forward(self, x_BSD: torch.Tensor, places_BT: torch.Tensor | None) -> torch.Tensor:
        if places_BT is None:
            return x_BSD
        mask_BSD = self.mask(self.own(places_BT), x_BSD.shape[-1])
        return torch.where(mask_BSD, x_BSD * (_LEVELS / self.kept), 0.0)

    def mask(self, places_BS: torch.Tensor, width: int) -> torch.Tensor:
        """Which elements are kept.

        Args:
            places_BS: int64, each token's number in the run.
            width: D.

        Returns:
            bool [B, S, D].
        """
        tokens_N = places_BS.flatten()
        if torch.compiler.is_compiling():
            chunks = (tokens_N,)
        else:
            size = _CHUNK_ELEMENTS.get(tokens_N.device.type, _CHUNK_ELEMENTS_ELSEWHERE)
            chunks = tokens_N.split(max(1, size // width))
        kept = [token_halves(self.seed, self.stream, chunk, width) < self.kept for chunk in chunks]
        return torch.cat(kept).view(*places_BS.shape, width)


def _all(places_BT: torch.Tensor) -> torch.Tensor:
    return places_BT
