"""Which operators carry what tensor parallel ranks exchange."""

import pytest
import torch
import torch.distributed as dist
from tests.ranks import ranks
from torch.utils._python_dispatch import TorchDispatchMode

from drumline.parallel.tensor.collectives import Ranks, gather_tokens, start_gather


class _Names(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


def _ranks() -> Ranks:
    group = dist.group.WORLD
    assert group is not None
    return Ranks(group, dist.get_world_size(), dist.get_rank())


@ranks(2)
def test_no_gather_is_the_functional_one_which_corrupts_the_heap_on_gloo():
    x = torch.ones(1, 2, 3, requires_grad=True)
    with _Names() as names:
        gather_tokens(x, _ranks()).sum().backward()
    assert any("allgather" in name for name in names.seen), names.seen
    assert not any("all_gather_into_tensor" in name for name in names.seen), names.seen


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (1, 2, 3)])
@pytest.mark.parametrize("transposed", [False, True])
@ranks(3)
def test_a_gather_gives_each_rank_all_tensors_in_the_order_of_the_ranks(transposed, shape):
    here = _ranks()

    def made(rank: int) -> torch.Tensor:
        x = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape) + 100 * rank
        return x.mT if transposed and x.dim() > 1 else x

    assert torch.equal(start_gather(made(here.rank), here)(), torch.stack([made(rank) for rank in range(here.degree)]))
