"""Runs a schedule: this rank's actions in their order, with the sends and receives that follow from them.

torch's own runtime is not used: it adds sends and receives of its own, reduces gradients where it chooses, does not say
when an action ran, and is built for one number of micro-batches, where a validation has another.

B sequences, T tokens, D model width.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from drumline.data import Batch
from drumline.parallel.pipeline.measure import Watch
from drumline.parallel.pipeline.stage import OnAhead, OnRouted, Stage, call
from drumline.parallel.pipeline.transfer import Transfers
from drumline.schedules import Action, Kind, Receive, Schedule, Send, Step, check, forwards_only, handed_over, programs


@dataclass(frozen=True)
class Pipeline:
    """The stages of a rank, and how they work together with those of others.

    Attributes:
        stages: of this rank, by their index along the model.
        schedule: makes the schedule of a step of so many micro-batches.
        placement: the rank of each stage, in every schedule.
        rank: of this process in the pipeline.
        peers: the world's rank of each rank of the pipeline.
        group: of those; None where the pipeline has one rank.
        hidden: (dim, dtype) of what goes from stage to stage.
        token_shares: ranks that share out the tokens of what goes.
    """

    stages: Mapping[int, Stage]
    schedule: Callable[[int], Schedule]
    placement: tuple[int, ...]
    rank: int
    peers: Sequence[int]
    group: dist.ProcessGroup | None
    hidden: tuple[int, torch.dtype]
    token_shares: int = 1
    _programs: dict[tuple[bool, int], tuple[Schedule, tuple[Step, ...]]] = field(default_factory=dict, repr=False)

    def forward_backward(
        self,
        batches: Sequence[Batch],
        num_tokens: int,
        on_routed: OnRouted | None = None,
        on_ahead: OnAhead | None = None,
        watch: Watch | None = None,
    ) -> torch.Tensor:
        """Accumulates the gradients of all micro-batches in this rank's stages.

        Args:
            batches: the micro-batches, each [B, T], all of one shape; the same on every rank of the pipeline.
            num_tokens: valid tokens of the global batch.
            on_routed: is told what the routers of this rank's layers did.
            on_ahead: is told the losses of tokens further ahead, on the rank of the last stage.
            watch: is told of each action.

        Returns:
            losses_M, fp32; 0 on ranks without the last stage.
        """
        schedule, program = self._program(len(batches), has_backward=True)
        left = Counter(a.stage for a in schedule.order[self.rank] if a.kind is not Kind.FORWARD)
        split = {a.stage for a in schedule.order[self.rank] if a.kind in (Kind.INPUT, Kind.WEIGHT)}
        losses_M = torch.zeros(len(batches), device=batches[0].tokens_BT.device)
        for index in split:
            self.stages[index].hold_gradients()

        def run(action: Action, given_BTD: torch.Tensor | None) -> torch.Tensor | None:
            stage = self.stages[action.stage]
            if action.kind is Kind.FORWARD:
                result = stage.forward(
                    action.microbatch, batches[action.microbatch], given_BTD, num_tokens, on_routed, on_ahead
                )
                if action.stage == schedule.num_stages - 1:
                    losses_M[action.microbatch] = result
                return result
            left[action.stage] -= 1
            is_last = not left[action.stage]
            if action.stage not in split:
                stage.gradients.set_sync(is_last)
            stage.gradients.begin(action.microbatch)
            result = stage.backward(action, given_BTD)
            if action.kind is not Kind.INPUT:
                stage.gradients.end(action.microbatch)
            if action.stage in split and action.kind is not Kind.INPUT:
                stage.take_gradients(is_last=is_last)
            return result

        self._execute(schedule, program, batches, run, watch)
        return losses_M

    @torch.no_grad()
    def loss(self, batches: Sequence[Batch]) -> torch.Tensor:
        """The summed loss of each micro-batch, without gradients.

        Args:
            batches: as in `forward_backward`, but of any number.

        Returns:
            losses_M, fp32; 0 on ranks without the last stage.
        """
        schedule, program = self._program(len(batches), has_backward=False)
        losses_M = torch.zeros(len(batches), device=batches[0].tokens_BT.device)

        def run(action: Action, given_BTD: torch.Tensor | None) -> torch.Tensor:
            result = call(self.stages[action.stage].part, batches[action.microbatch], given_BTD)
            if isinstance(result, tuple):
                return result[0]
            losses_M[action.microbatch] = result
            return result

        self._execute(schedule, program, batches, run, None)
        return losses_M

    def _program(self, num_microbatches: int, *, has_backward: bool) -> tuple[Schedule, tuple[Step, ...]]:
        key = has_backward, num_microbatches
        if key not in self._programs:
            if has_backward:
                check(schedule := self.schedule(num_microbatches))
            else:
                schedule = forwards_only(self.placement, num_microbatches)
            self._programs[key] = schedule, programs(schedule)[self.rank]
        return self._programs[key]

    def _execute(
        self,
        schedule: Schedule,
        program: Sequence[Step],
        batches: Sequence[Batch],
        run: Callable[[Action, torch.Tensor | None], torch.Tensor | None],
        watch: Watch | None,
    ) -> None:
        transfers = Transfers(self.peers, self.group)
        outbox: dict[Action, torch.Tensor] = {}
        dim, dtype = self.hidden
        for step in program:
            if isinstance(step, Receive):
                tokens_BT = batches[step.result.microbatch].tokens_BT
                num_rows, num_tokens = tokens_BT.shape
                shape = (num_rows, num_tokens // self.token_shares, dim)
                hidden_BTD = torch.empty(shape, dtype=dtype, device=tokens_BT.device)
                transfers.receive(step.result, hidden_BTD, step.peer)
            elif isinstance(step, Send):
                transfers.send(outbox.pop(step.result), step.peer)
            else:
                needed = _needed(step, schedule)
                given_BTD = None if needed is None else transfers.take(needed)
                if watch is not None:
                    watch.begin(step)
                result = run(step, given_BTD)
                if watch is not None:
                    watch.end()
                handed = handed_over(step, schedule)
                if handed is not None:
                    assert result is not None
                    if handed[1] == self.rank:
                        transfers.keep(handed[0], result)
                    else:
                        outbox[handed[0]] = result
        transfers.finish()


def _needed(action: Action, schedule: Schedule) -> Action | None:
    """What an action needs of another stage."""
    stage, kind, microbatch = action
    if kind is Kind.FORWARD:
        return Action(stage - 1, Kind.FORWARD, microbatch) if stage > 0 else None
    is_given = kind is not Kind.WEIGHT and stage < schedule.num_stages - 1
    return Action(stage + 1, Kind.INPUT, microbatch) if is_given else None
