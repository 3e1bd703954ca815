"""The loop: data in, one step, records out, commits and validation when they are due.

Everything that watches is an observer; everything that the ranks must agree on passes through `agree` at the start of a step.
"""

import resource
import sys
import time
from collections.abc import Sequence

import torch

from drumline.data import Batch
from drumline.optimizers import learning_rate
from drumline.planner import flops_per_token
from drumline.train import finite
from drumline.train.records import CommitRecord, EndRecord, Observer, Record, StepRecord, ValidationRecord
from drumline.train.setup import Parts
from drumline.train.signals import StopRequest
from drumline.train.state import all_pieces
from drumline.train.step import StepResult, count_valid, make_reduce_scalars, train_step, validate


class Loop:
    """Runs the steps that are left of a run.

    Args:
        parts: everything that was set up.
        observers: receive every record, in order.
        stop: asks for a polite end.
    """

    def __init__(self, parts: Parts, observers: Sequence[Observer], stop: StopRequest):
        self._parts = parts
        self._observers = observers
        self._stop = stop
        self._reduce_scalars = make_reduce_scalars(parts.world, parts.mesh)
        recipe = parts.recipe
        self._step_tokens = recipe.data.global_batch * recipe.data.seq_len
        self._step_flops = self._step_tokens * flops_per_token(recipe.model, recipe.data.seq_len)
        self._committed = parts.first_step if parts.resumed_from else -1

    def run(self) -> str:
        """Trains to the last step, or until asked to stop.

        Returns:
            `done` or `preempted`.

        Raises:
            NonFiniteError: a step's loss or gradient is not finite.
        """
        parts, recipe = self._parts, self._parts.recipe
        step, reason = parts.first_step, "done"
        if step == 0:
            self._validate(0)
        while step < recipe.run.steps:
            begin = time.perf_counter()
            batches = parts.next_batches(step)
            num_tokens, stopping = self._agree(batches)
            if stopping:
                reason = "preempted"
                break
            self._train(step, batches, num_tokens, begin)
            step += 1
            if step < recipe.run.steps and _is_due(step, recipe.run.validate_every):
                self._validate(step)
            if step < recipe.run.steps and _is_due(step, recipe.checkpoint.every):
                self._commit(step)
        if reason == "done" and step > parts.first_step:
            self._validate(step)
        if reason == "preempted" or recipe.checkpoint.at_end:
            self._commit(step)
        parts.saver.wait()
        self._emit(EndRecord(step, reason))
        return reason

    def _agree(self, batches: Sequence[Batch]) -> tuple[int, bool]:
        # One small collective a step: the count of valid tokens, and whether any rank was asked to stop.
        valid = sum(count_valid(batch) for batch in batches)
        num_tokens, stopping = self._parts.world.sum([valid, int(self._stop.is_set)], torch.int64).tolist()
        return num_tokens, stopping > 0

    def _train(self, step: int, batches: Sequence[Batch], num_tokens: int, begin: float) -> None:
        parts, recipe = self._parts, self._parts.recipe
        lr = learning_rate(step, peak=recipe.optimizer.lr, num_steps=recipe.run.steps, schedule=recipe.schedule)

        def check_finite(result: StepResult, batches: Sequence[Batch]) -> None:
            finite.check(
                step + 1, result.loss, result.grad_norm, model=parts.model, batches=batches, world=parts.world
            )

        result = train_step(
            batches,
            num_tokens,
            lr,
            model=parts.model,
            gradients=parts.gradients,
            optimizer=parts.optimizer,
            max_grad_norm=recipe.optimizer.max_grad_norm,
            reduce_scalars=self._reduce_scalars,
            check_finite=check_finite,
        )
        seconds = time.perf_counter() - begin
        peak = parts.peak_flops
        self._emit(
            StepRecord(
                step=step + 1,
                loss=result.loss,
                grad_norm=result.grad_norm,
                lr=lr,
                num_tokens=num_tokens,
                tokens_per_s=self._step_tokens / seconds,
                mfu=self._step_flops / seconds / peak if peak else None,
                memory_bytes=peak_memory(parts.world.device),
                step_s=seconds,
            )
        )

    def _validate(self, step: int) -> None:
        if not self._parts.validation:
            return
        loss, num_tokens = validate(self._parts.model, self._parts.validation, self._parts.world)
        self._emit(ValidationRecord(step, loss, num_tokens))

    def _commit(self, step: int) -> None:
        if step == self._committed:
            return
        begin = time.perf_counter()
        parts = self._parts
        commit = parts.saver.save(step, all_pieces(parts.model, parts.optimizer), parts.commit_state(step))
        self._committed = step
        self._emit(CommitRecord(step, commit.path, commit.num_bytes, time.perf_counter() - begin))

    def _emit(self, record: Record) -> None:
        for observer in self._observers:
            observer.observe(record)


def peak_memory(device: torch.device) -> int:
    """The most bytes that this process has held: allocated on CUDA, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def _is_due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
