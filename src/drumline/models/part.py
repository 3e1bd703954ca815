"""A part of a decoder: a run of its layers, with the embedding before them or the output behind them.

Parameters have the names that they have in the whole model, so that weights, checkpoints and random streams need not
know how a model was cut.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from torch import nn


@dataclass(frozen=True)
class Part:
    """What a part of a decoder holds.

    Attributes:
        layers: indices of its blocks in the whole model, one after the other.
        has_embedding: it takes tokens; else the hidden states of the part before it.
        has_output: it gives logits or the loss; else hidden states.
    """

    layers: range
    has_embedding: bool
    has_output: bool


def whole(num_layers: int) -> Part:
    """The part that is the whole model."""
    return Part(range(num_layers), has_embedding=True, has_output=True)


class Layers(nn.Module):
    """Blocks by their index in the whole model, of which there may be any; iterated, they come in order.

    Args:
        blocks: by index, ascending.
    """

    def __init__(self, blocks: Mapping[int, nn.Module]):
        super().__init__()
        for index, block in blocks.items():
            self.add_module(str(index), block)

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return (block for _, block in self.items())

    def __getitem__(self, index: int) -> nn.Module:
        return self.get_submodule(str(index))

    def items(self) -> Iterator[tuple[int, nn.Module]]:
        """Index in the whole model and block."""
        return ((int(index), cast(nn.Module, block)) for index, block in self._modules.items())
