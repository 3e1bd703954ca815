"""The loop: data in, one step, records out, commits and validation when they are due.

Everything that watches is an observer; everything that the ranks must agree on passes through `agree` at the start
of a step.
"""

import resource
import sys
import time
from collections.abc import Sequence

import torch

from drumline.checkpoint import CommitHandle, Saver
from drumline.data import Batch
from drumline.optimizers import learning_rate
from drumline.parallel.pipeline import Measure, join
from drumline.planner import flops_per_token
from drumline.schedules import Timeline
from drumline.train import finite
from drumline.train.further import FurtherTally
from drumline.train.records import (
    CommitRecord,
    EndRecord,
    Observer,
    Record,
    StartRecord,
    StepRecord,
    TimelineRecord,
    ValidationRecord,
)
from drumline.train.routing import RoutingTally
from drumline.train.scalars import make_reduce_scalars
from drumline.train.setup import Parts, commit_state
from drumline.train.signals import StopRequest
from drumline.train.step import StepResult, count_valid, train_step, validate


class Loop:
    """Runs the steps that are left of a run.

    Args:
        parts: everything that was set up.
        observers: receive every record, in order.
        stop: asks for a polite end.
        saver: writes commits.
        peak_flops: FLOP/s of all ranks together that MFU is measured against; None: no MFU.
    """

    def __init__(
        self,
        parts: Parts,
        observers: Sequence[Observer],
        stop: StopRequest,
        saver: Saver,
        peak_flops: float | None,
    ):
        self._parts = parts
        self._saver = saver
        self._peak_flops = peak_flops
        self.step = parts.first_step
        self._saving: CommitHandle | None = None
        self._observers = observers
        self._stop = stop
        has_own_tokens = parts.recipe.layout.sequence_parallel or parts.mesh.is_first_along("tp")
        self._routing = RoutingTally(parts.model, parts.world.sum, counts=has_own_tokens)
        self._further = FurtherTally(
            parts.recipe.model.num_mtp_layers, parts.world.sum, counts=parts.mesh.is_first_along("tp")
        )
        self._reduce_scalars = make_reduce_scalars(parts.world, parts.mesh, exact=parts.recipe.numerics.mode == "exact")
        recipe = parts.recipe
        self._step_tokens = recipe.data.global_batch * recipe.data.seq_len
        self._step_flops = self._step_tokens * flops_per_token(recipe.model, recipe.data.seq_len).total
        self._committed = parts.first_step  # of step 0 there is nothing to keep: the seed gives the weights

    def run(self) -> str:
        """Trains to the last step, or until asked to stop.

        Returns:
            `done` or `preempted`.

        Raises:
            NonFiniteError: a step's loss or gradient is not finite.
        """
        recipe = self._parts.recipe
        self._emit(self._start_record())
        try:
            reason = self._run_steps()
            if reason == "preempted" or recipe.checkpoint.at_end:
                self._commit()
            self._report_commit(wait=True)
        except BaseException:
            self._emit(EndRecord(self.step, "failed"))
            raise
        self._emit(EndRecord(self.step, reason))
        return reason

    def _run_steps(self) -> str:
        recipe = self._parts.recipe
        if self.step == 0:
            self._validate()
        while self.step < recipe.run.steps:
            begin = time.perf_counter()
            batches = [_to_device(batch, self._parts.world.device) for batch in next(self._parts.loader)]
            num_tokens, stopping = self._agree(batches)
            if stopping:
                return "preempted"
            self._train(batches, num_tokens, begin)
            self.step += 1
            self._report_commit(wait=False)
            is_last = self.step == recipe.run.steps
            if is_last or _is_due(self.step, recipe.run.validate_every):
                self._validate()
            if not is_last and _is_due(self.step, recipe.checkpoint.every):
                self._commit()
        return "done"

    def _start_record(self) -> StartRecord:
        parts = self._parts
        return StartRecord(
            step=self.step,
            num_steps=parts.recipe.run.steps,
            layout=str(parts.recipe.layout),
            world=parts.world.size,
            resumed_from=parts.resumed_from,
            attention=parts.attention,
            peak_flops=self._peak_flops,
        )

    def _agree(self, batches: Sequence[Batch]) -> tuple[int, bool]:
        # One small collective a step: the count of valid tokens, and whether any rank was asked to stop.
        valid = count_valid(batches, self._parts.mesh)
        num_tokens, stopping = self._parts.world.sum([valid, int(self._stop.is_set)], torch.int64).tolist()
        return num_tokens, stopping > 0

    def _train(self, batches: Sequence[Batch], num_tokens: int, begin: float) -> None:
        parts, recipe = self._parts, self._parts.recipe
        lr = learning_rate(self.step, peak=recipe.optimizer.lr, num_steps=recipe.run.steps, schedule=recipe.schedule)

        def check_finite(result: StepResult, batches: Sequence[Batch]) -> None:
            finite.check(self.step + 1, result.loss, result.grad_norm, parts=parts, batches=batches)

        measure = self._measure() if self.step + 1 == recipe.run.timeline else None
        result = train_step(
            batches,
            num_tokens,
            lr,
            passes=parts.passes,
            gradients=parts.gradients,
            optimizer=parts.optimizer,
            max_grad_norm=recipe.optimizer.max_grad_norm,
            reduce_scalars=self._reduce_scalars,
            check_finite=check_finite,
            on_routed=self._routing.add if self._routing.has_experts else None,
            on_ahead=self._further.add,
            watch=measure,
        )
        if measure is not None:
            self._emit(TimelineRecord(self.step + 1, self._timeline(measure)))
        router = self._routing.finish(with_load=_is_due(self.step + 1, recipe.metrics.expert_load_every))
        seconds = time.perf_counter() - begin
        peak = self._peak_flops
        self._emit(
            StepRecord(
                step=self.step + 1,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=lr,
                num_tokens=num_tokens,
                tokens_per_s=self._step_tokens / seconds,
                mfu=self._step_flops / seconds / peak if peak else None,
                memory_bytes=peak_memory(parts.world.device),
                step_s=seconds,
                router=router,
                mtp_loss=self._further.finish(num_tokens),
            )
        )

    def _measure(self) -> Measure:
        self._parts.world.barrier()  # the clocks of all ranks start here
        return Measure(self._parts.world.device)

    def _timeline(self, measure: Measure) -> Timeline:
        parts = self._parts
        rows = parts.world.gather_objects(measure.spans())
        schedule = parts.recipe.layout.pp_schedule if parts.recipe.layout.pp > 1 else "one rank"
        return join(schedule, parts.passes.placement, [rows[rank] for rank in parts.mesh.ranks_along("pp")])

    def _validate(self) -> None:
        if not self._parts.validation:
            return
        parts = self._parts
        loss, num_tokens = validate(
            parts.passes, parts.model, parts.validation, parts.world, parts.mesh, self._reduce_scalars
        )
        self._emit(ValidationRecord(self.step, loss, num_tokens))

    def _commit(self) -> None:
        if self.step == self._committed:
            return
        parts = self._parts
        self._report_commit(wait=True)
        self._saving = self._saver.save(self.step, parts.pieces(), commit_state(self.step, parts))
        self._committed = self.step

    def _report_commit(self, *, wait: bool) -> None:
        # Told once it is durable, not when it is begun: nobody should read of a commit that does not exist.
        save = self._saving
        if save is not None and (wait or save.done()):
            path = save.wait()
            self._saving = None
            self._emit(CommitRecord(save.step, path, save.num_bytes, save.stall_s))

    def _emit(self, record: Record) -> None:
        for observer in self._observers:
            observer.observe(record)


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: allocated on CUDA, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def _to_device(batch: Batch, device: torch.device) -> Batch:
    return batch if device.type == "cpu" else batch.map(lambda tensor: tensor.to(device, non_blocking=True))


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
