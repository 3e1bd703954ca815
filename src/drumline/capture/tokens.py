"""Which tokens of the global batch a rank has in each micro-batch: what makes activations comparable across layouts.

A rank sees some tokens of a micro-batch: a share of its positions under context parallelism, of these again a share
under sequence parallelism. Which they are is found by sending the tokens' numbers the way the tokens go.

B sequences, T tokens, N tokens of any number of sequences.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from drumline.data import Batch
from drumline.parallel import Mesh
from drumline.recipe.lanes import samples_of
from drumline.recipe.sections import Recipe


@dataclass(frozen=True)
class Tokens:
    """The tokens of a rank.

    Attributes:
        numbers: for each micro-batch of this rank, [B, T]: the number of each token in the global batch.
        num_tokens: of the global batch.
        first: the number, among all micro-batches of the global batch, of this rank's first.
        tp: tensor-parallel ranks and this rank's place among them.
    """

    numbers: Sequence[torch.Tensor]
    num_tokens: int
    first: int = 0
    tp: tuple[int, int] = (1, 0)
    _rows: dict[tuple[int, bool], torch.Tensor] = field(default_factory=dict, repr=False, compare=False)

    def rows(self, microbatch: int, num_rows: int) -> torch.Tensor | None:
        """The tokens that the rows of an activation belong to.

        Args:
            microbatch: of this rank.
            num_rows: of the activation, all sequences together.

        Returns:
            int64 [num_rows]; the same object for the same question. None: they are neither all tokens of the
            micro-batch nor a tensor-parallel share of them.
        """
        if microbatch >= len(self.numbers):
            return None
        numbers_BT, (degree, place) = self.numbers[microbatch], self.tp
        is_share = num_rows * degree == numbers_BT.numel() and degree > 1
        if not is_share and num_rows != numbers_BT.numel():
            return None
        asked = microbatch, is_share
        if asked not in self._rows:
            held_BT = numbers_BT.chunk(degree, dim=1)[place] if is_share else numbers_BT
            self._rows[asked] = held_BT.flatten().clone()
        return self._rows[asked]


def tokens_of(recipe: Recipe, mesh: Mesh, share: Callable[[Batch], Batch] | None) -> Tokens:
    """The tokens of this rank.

    Args:
        recipe: data and numerics are read.
        mesh: of the layout.
        share: what the rank keeps of a micro-batch whose rows it shares with others; None: all of it.

    Returns:
        The tokens.
    """
    data, samples = recipe.data, samples_of(mesh.data_rank, mesh.layout.data_degree, recipe)
    num_tokens = data.global_batch * data.seq_len
    numbers_BT = torch.arange(num_tokens).view(-1, data.seq_len)[samples.start : samples.stop]
    if share is not None:
        numbers_BT = share(Batch(numbers_BT, numbers_BT, None)).tokens_BT
    numbers = numbers_BT.split(data.micro_batch)
    return Tokens(numbers, num_tokens, samples.start // data.micro_batch, (mesh.layout.tp, mesh.coordinate("tp")))
