"""Replays which experts tokens go to, so that two runs of a mixture of experts compute the same model.

A token whose scores of two experts are closer than rounding may go to either; what follows is another model, and no
comparison of values says anything. With the choices of a reference, weights of the chosen experts still come from the
run's own scores, and all else is comparable again.

N tokens, E experts, K experts of a token.
"""

from collections.abc import Callable
from pathlib import Path

import torch

from drumline.capture.baseline import EXACT
from drumline.capture.files import RankFile
from drumline.capture.keys import CHOICE, key
from drumline.capture.reading import Capture, CaptureError
from drumline.models.moe.router import Router, Routing, scores, weigh

_Read = Callable[[str], torch.Tensor]


class ForcedRouting:
    """The choices of a reference.

    Args:
        read: a tensor by key.
        keys: that there are.
        name: of the reference, for messages.
    """

    def __init__(self, read: _Read, keys: set[str], name: str):
        self._read, self._keys, self._name = read, keys, name
        self._choices: dict[str, torch.Tensor] = {}

    def apply(self, step: int, module: str, router: Router, routing: Routing, rows_N: torch.Tensor) -> Routing:
        """Gives a router's answer with the reference's choices.

        Args:
            step: from 1.
            module: logical name of the router, with its occurrence.
            router: that answered.
            routing: its answer.
            rows_N: the tokens, as they are numbered in the global batch.

        Returns:
            The answer, with other experts where a token chose others, and with the weights that the router's own scores
            give those. A token that chose the same keeps its order of them.
        """
        wanted = key(step, CHOICE, module)
        if wanted not in self._choices:
            self._choices = {name: found for name, found in self._choices.items() if name.startswith(f"{step}/")}
            self._choices[wanted] = self._read(wanted)
        experts_NK = self._choices[wanted][rows_N].to(routing.experts_NK.device)
        is_same_N1 = (experts_NK == routing.experts_NK.sort(dim=-1).values).all(dim=-1, keepdim=True)
        experts_NK = torch.where(is_same_N1, routing.experts_NK, experts_NK)
        weights_NK = weigh(scores(routing.logits_NE, router.moe), router.moe, experts_NK)
        weights_NK = torch.where(is_same_N1, routing.weights_NK, weights_NK)
        return routing._replace(experts_NK=experts_NK, weights_NK=weights_NK)

    def require(self, steps: range) -> None:
        """Refuses where the reference lacks the choices of a step.

        Args:
            steps: that are trained.

        Raises:
            CaptureError: names the steps that it has.
        """
        has = sorted({int(name.split("/", 1)[0]) for name in self._keys if f"/{CHOICE}/" in name})
        if not has:
            raise CaptureError(f"{self._name} has no choices of experts: its model is dense, or --only left them out")
        if not set(steps) <= set(has):
            raise CaptureError(
                f"{self._name} has choices of steps {has}, and steps {list(steps)} are trained: routing is forced in "
                f"every one of them\n  try: --steps {','.join(map(str, has))}"
            )


def read_routing(folder: Path) -> ForcedRouting:
    """Opens the choices of a capture or of a baseline.

    Args:
        folder: of it.

    Returns:
        The choices.

    Raises:
        CaptureError: it is neither, or keeps no elements.
    """
    if (folder / EXACT).exists():
        file = RankFile(folder / EXACT)
        index = {part.key: at for at, part in enumerate(file.parts)}
        return ForcedRouting(lambda name: file.part(index[name]).tensor, set(index), str(folder))
    capture = Capture(folder)
    if not capture.has_elements:
        raise CaptureError(f"{folder} keeps no elements: capture it with --level tensors")
    return ForcedRouting(lambda name: capture.read(name).tensor, set(capture.keys), str(folder))
