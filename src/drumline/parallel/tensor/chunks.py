"""Matmuls in chunks, each behind the transfer of the next: a rank's share of tokens is a chunk.

    gather    step s: send the chunk held on, multiply it meanwhile           chunk of rank r - s, on rank r
    scatter   step s: multiply the next chunk while the sum of the last one comes, add, send the sum on
                                                                              chunk of rank r - 1 - s, on rank r

A transfer goes from each rank to the next one only, by P2P, so that it needs no more than that link; the matmul of one
chunk hides it. Sums begin at the rank after a chunk's owner and end at the owner.
Source: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models", ASPLOS, sections 4 and 5.

T tokens, S tokens of a rank's share, D and F widths.
"""

from collections.abc import Callable, Sequence

import torch

from drumline.comm import Passing
from drumline.parallel.tensor.collectives import Ranks, joined, shares
from drumline.parallel.tensor.tokens import sum_of_products


class InChunks:
    """`Matmuls` whose transfers go around a ring.

    Args:
        ranks: of the group.
    """

    def __init__(self, ranks: Ranks):
        self._ranks = ranks

    def gather(self, x: torch.Tensor, weights: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """As `Matmuls`."""
        degree, rank = self._ranks.degree, self._ranks.rank
        whole = x.new_empty(degree, *x.shape)
        whole[rank] = x
        products = [x.new_empty(degree, *x.shape[:-1], weight.shape[1]) for weight in weights]
        for step in range(degree):
            here, coming = whole[(rank - step) % degree], whole[(rank - step - 1) % degree]
            passing = None if step == degree - 1 else self._pass_on(here, coming)
            for product, weight in zip(products, weights, strict=True):
                product[(rank - step) % degree] = here @ weight
            if passing is not None:
                passing.wait()
        return [joined(product) for product in products], joined(whole)

    def scatter(self, factors: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Callable[[], torch.Tensor]:
        """As `Matmuls`; it has come when this returns."""
        degree, rank = self._ranks.degree, self._ranks.rank
        cut = [(shares(x, degree), weight) for x, weight in factors]

        def product(step: int) -> torch.Tensor:
            return sum_of_products([(parts[(rank - 1 - step) % degree], weight) for parts, weight in cut])

        found = product(0)
        for step in range(1, degree):
            passing = self._pass_on(found)
            # Not in place: checkpointing may have kept the product.
            found = product(step) + passing.wait()
        return lambda: found

    def _pass_on(self, sent: torch.Tensor, into: torch.Tensor | None = None) -> Passing:
        ranks = self._ranks
        return Passing(sent, ranks.degree, ranks.rank, ranks.group, into=into)
