"""What modules give in the forward, by logical name and token: where a loss goes wrong before any gradient can tell.

A rank sees some tokens of a micro-batch: a share of its positions under context parallelism, of these again a share
under sequence parallelism. Which they are is found by sending the tokens' numbers the way the tokens go.
"""

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from drumline.verify.recorded import FORWARD, Part, key

_WATCHED = re.compile(r"embedding|layers\.\d+(\.attention|\.mlp)?|norm|mtp\.\d+")


class ForwardWatch:
    """Records what the watched modules of a model give.

    Args:
        model: a decoder, or a rank's part of it, with logical names.
        tokens: for each micro-batch in its order, [B, T]: the number of each token in the global batch.
        num_tokens: of the global batch.
        tp: tensor-parallel ranks and this rank's place among them.
    """

    def __init__(self, model: nn.Module, tokens: Sequence[torch.Tensor], num_tokens: int, tp: tuple[int, int] = (1, 0)):
        self.parts: list[Part] = []
        self._tokens, self._num_tokens, self._tp = tokens, num_tokens, tp
        self._calls: dict[str, int] = {}
        # Where tokens further ahead are embedded too, calls do not tell which micro-batch they are of.
        has_further = model.shape.num_mtp_layers > 0  # pyright: ignore
        self._handles = [
            module.register_forward_hook(lambda _, inputs, output, name=name: self._take(name, output))
            for name, module in model.named_modules()
            if _WATCHED.fullmatch(name) and not (name == "embedding" and has_further)
        ]

    def stop(self) -> list[Part]:
        """Ends the watch; returns what was recorded."""
        for handle in self._handles:
            handle.remove()
        return self.parts

    def _take(self, name: str, output: Any) -> None:
        if torch._C._current_graph_task_id() != -1:  # a backward runs: activation checkpointing computes this again
            return
        call = self._calls.get(name, 0)
        self._calls[name] = call + 1
        if call >= len(self._tokens):
            return
        x_BTD = (output[0] if isinstance(output, tuple) else output).detach()
        tokens_BT, (degree, place) = self._tokens[call], self._tp
        if x_BTD.shape[1] * degree == tokens_BT.shape[1]:
            tokens_BT = tokens_BT.chunk(degree, dim=1)[place]
        x_ND = x_BTD.flatten(0, 1).clone()
        shape = (self._num_tokens, x_ND.shape[1])
        self.parts.append(Part(key(1, FORWARD, name), shape, x_ND, rows_N=tokens_BT.flatten().clone()))
