"""A training step without a loop around it, on made-up tokens."""

import torch

from drumline.data import Batch
from drumline.train.assemble import Assembled


def one_sequence(num_tokens: int, vocab_size: int) -> Batch:
    """A sequence of tokens drawn at random, the same ones each time."""
    tokens = torch.randint(vocab_size, (1, num_tokens + 1), generator=torch.Generator().manual_seed(0))
    starts = torch.zeros(1, num_tokens, dtype=torch.int32)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), starts)


def step(made: Assembled, batch: Batch) -> float:
    """Trains a step; returns its summed loss."""
    made.gradients.zero_grad()
    losses = made.passes.forward_backward([batch], batch.num_tokens)
    made.gradients.finish()
    made.optimizer.step()
    return float(losses.sum())
