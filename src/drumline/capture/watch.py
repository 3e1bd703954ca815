"""What modules give in the forward, and the gradients of it, by logical name and token.

Hooks are there from `start` to `stop` and at no other time. What activation checkpointing computes again is told apart.
A compiled block is watched at its border: what is in it is one graph, and a hook would break it.

B sequences, T tokens, D model width, N tokens of any number of sequences, E experts, K experts of a token.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from drumline.capture.calls import Calls, is_recomputing
from drumline.capture.forcing import ForcedRouting
from drumline.capture.keys import BACKWARD, CHOICE, FORWARD, RECOMPUTE, ROUTER, is_wanted, key
from drumline.capture.sink import Parts
from drumline.capture.teacher import Teacher, replaced
from drumline.capture.tokens import Tokens
from drumline.models.moe.router import Router, Routing
from drumline.schedules import Action

_BLOCK = r"(layers\.\d+|mtp\.\d+\.block)"
_WATCHED = re.compile(rf"embedding|{_BLOCK}(\.(attention_norm|attention|mlp_norm|mlp))?|norm|mtp\.\d+")


class ActivationWatch:
    """Records what the watched modules of a model give.

    Args:
        model: a decoder, or a rank's part of it, with logical names.
        tokens: of this rank.
        sink: takes what is recorded.
        kinds: of `forward`, `recompute`, `backward`, `router`, `choice`.
        only: patterns of names; empty: all.
        forced: replaces the choices of routers; None: they stay.
        teacher: replaces what modules give, and its gradients, once they are recorded; None: they stay.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: Tokens,
        sink: Parts,
        *,
        kinds: Sequence[str] = (FORWARD, RECOMPUTE, BACKWARD, ROUTER, CHOICE),
        only: Sequence[str] = (),
        forced: ForcedRouting | None = None,
        teacher: Teacher | None = None,
    ):
        self._forced, self._teacher = forced, teacher
        self._model, self._tokens, self._sink = model, tokens, sink
        self._kinds, self._only = frozenset(kinds), tuple(only)
        self._step, self._microbatch = 0, 0
        self._calls = Calls()
        self._seen: set[tuple[int, str]] = set()
        self._undo: list[Callable[[], None]] = []

    def start(self, step: int) -> None:
        """Begins to watch a step, whose number counts from 1."""
        self._step = step
        self._calls.clear()
        self._seen.clear()
        compiled: list[str] = []
        for name, module in self._model.named_modules():
            if any(name.startswith(f"{outer}.") for outer in compiled):
                continue
            is_compiled = module._compiled_call_impl is not None
            if is_compiled:
                compiled.append(name)
            if _WATCHED.fullmatch(name) and is_wanted(name, self._only):
                self._watch(module, name, is_compiled)
            elif isinstance(module, Router) and self._sees(name):
                self._hook(module, lambda router, _, routing, name=name: self._take_routing(name, router, routing))

    def stop(self) -> None:
        """Ends the watch."""
        for undo in self._undo:
            undo()
        self._undo.clear()

    def begin(self, action: Action) -> None:
        """A forward or backward of a micro-batch starts."""
        self._microbatch = action.microbatch

    def end(self) -> None:
        """It has ended."""

    def _sees(self, name: str) -> bool:
        """Whether a router is watched."""
        return self._forced is not None or (bool(self._kinds & {ROUTER, CHOICE}) and is_wanted(name, self._only))

    def _watch(self, module: nn.Module, name: str, is_compiled: bool) -> None:
        if not is_compiled:
            self._hook(module, lambda _, __, output: self._take(module, name, output))
            return
        compiled: Any = module._compiled_call_impl

        def call(*args: Any, **kwargs: Any) -> Any:
            output = compiled(*args, **kwargs)
            given = self._take(module, name, output)
            return output if given is None else given

        module._compiled_call_impl = call
        self._undo.append(lambda: setattr(module, "_compiled_call_impl", compiled))

    def _hook(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        self._undo.append(module.register_forward_hook(hook).remove)

    def _take(self, module: nn.Module, name: str, output: Any) -> Any:
        """Records an output; gives what takes its place, None where nothing does."""
        x_BTD = output[0] if isinstance(output, tuple) else output
        microbatch, is_again = self._microbatch, is_recomputing()
        kind = RECOMPUTE if is_again else FORWARD
        numbered = self._calls.numbered(module, name, kind, microbatch)
        self._put(kind, numbered, x_BTD, microbatch)
        if self._teacher is None:
            if not is_again and BACKWARD in self._kinds and x_BTD.requires_grad:
                x_BTD.register_hook(lambda grad: self._take_gradient(numbered, grad, microbatch))
            return None
        wanted = self._recorded(FORWARD, numbered, x_BTD, microbatch)
        given_BTD = replaced(x_BTD, wanted, lambda grad: self._exchange_gradient(numbered, grad, microbatch))
        return (given_BTD, *output[1:]) if isinstance(output, tuple) else given_BTD

    def _exchange_gradient(self, name: str, grad_BTD: torch.Tensor, microbatch: int) -> torch.Tensor:
        self._take_gradient(name, grad_BTD, microbatch)
        wanted = self._recorded(BACKWARD, name, grad_BTD, microbatch)
        return grad_BTD if wanted is None else wanted

    def _recorded(self, kind: str, name: str, x: torch.Tensor, microbatch: int) -> torch.Tensor | None:
        assert self._teacher is not None
        rows_N = self._tokens.rows(microbatch, x.shape[:-1].numel())
        return self._teacher.rows(key(self._step, kind, name), rows_N, x.detach())

    def _take_gradient(self, name: str, grad_BTD: torch.Tensor, microbatch: int) -> None:
        if (microbatch, name) not in self._seen:  # a backward that is split comes by twice
            self._seen.add((microbatch, name))
            self._put(BACKWARD, name, grad_BTD, microbatch)

    def _take_routing(self, name: str, router: Router, routing: Routing) -> Routing:
        is_again = is_recomputing()
        numbered = self._calls.numbered(router, name, RECOMPUTE if is_again else ROUTER, self._microbatch)
        if self._forced is not None:
            rows_N = self._tokens.rows(self._microbatch, len(routing.experts_NK))
            assert rows_N is not None, "a router sees all tokens of a micro-batch, or a tensor-parallel share"
            routing = self._forced.apply(self._step, numbered, router, routing, rows_N)
        if not is_again:
            self._put(ROUTER, numbered, routing.logits_NE, self._microbatch)
            self._put(CHOICE, numbered, routing.experts_NK.sort(dim=-1).values, self._microbatch)
        return routing

    def _put(self, kind: str, name: str, x: torch.Tensor, microbatch: int) -> None:
        if kind not in self._kinds:
            return
        x_ND = x.detach().flatten(0, -2)
        rows_N = self._tokens.rows(microbatch, len(x_ND))
        if rows_N is None:
            return
        shape, number = (self._tokens.num_tokens, x_ND.shape[1]), self._tokens.first + microbatch
        self._sink.add(key(self._step, kind, name), shape, x_ND, rows_N=rows_N, microbatch=number)


def module_of(name: str) -> str:
    """The watched module that a module or parameter lies in.

    Args:
        name: logical, with or without an occurrence.

    Returns:
        The innermost that is watched, such as `layers.1.mlp`; empty where none is.
    """
    words = name.partition("#")[0].split(".")
    within = (".".join(words[:count]) for count in range(len(words), 0, -1))
    return next((outer for outer in within if _WATCHED.fullmatch(outer)), "")
