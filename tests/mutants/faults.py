"""Faults of a whole step, each a patch: of sums over ranks, of the loss, the norm, the optimizer, the first weights, of
recomputation. Faults of one way to split the work are beside the tests of that way.
"""

import importlib

import torch
import torch.distributed as dist

from drumline.memory import checkpointing
from drumline.optimizers import build_adamw
from drumline.parallel.context.split import ContextSplit
from drumline.parallel.replicate import Replicate
from drumline.train import assemble, step
from drumline.train.step import InTurn


def summed_by(monkeypatch, reduce):
    monkeypatch.setitem(Replicate.__init__.__kwdefaults__, "all_reduce", reduce)


def gradients_are_not_summed(monkeypatch):
    summed_by(monkeypatch, lambda flat, group: None)


def gradients_are_averaged(monkeypatch):
    def average(flat, group):
        dist.all_reduce(flat, group=group)
        flat.div_(group.size())

    summed_by(monkeypatch, average)


def gradients_are_summed_twice(monkeypatch):
    def twice(flat, group):
        dist.all_reduce(flat, group=group)
        dist.all_reduce(flat, group=group)

    summed_by(monkeypatch, twice)


def loss_is_a_mean_of_means(monkeypatch):
    real = InTurn.forward_backward

    class At:  # the fault is the mean's, not the numbering's
        def __init__(self, watch, index):
            self.watch, self.index, self.end = watch, index, watch.end

        def begin(self, action):
            self.watch.begin(action._replace(microbatch=self.index))

    def each(self, batches, num_tokens, on_routed, on_ahead, watch):
        return sum(
            real(
                self,
                [batch],
                batch.num_tokens * len(batches),
                on_routed,
                on_ahead,
                None if watch is None else At(watch, i),
            )
            for i, batch in enumerate(batches)
        )

    monkeypatch.setattr(InTurn, "forward_backward", each)


def every_replica_counts_in_the_norm(monkeypatch):
    monkeypatch.setattr(Replicate, "counted", Replicate.local)


def gradients_are_not_clipped(monkeypatch):
    monkeypatch.setattr(step, "clip", lambda *args: None)


def built_by(monkeypatch, change):
    monkeypatch.setattr(
        assemble,
        "build_adamw",
        lambda model, section, *rest, **options: change(build_adamw(model, section, *rest, **options), model, section),
    )


def norms_decay(monkeypatch):
    def change(optimizer, model, section):
        for group in optimizer.param_groups:
            group["weight_decay"] = section.weight_decay
        return optimizer

    built_by(monkeypatch, change)


def second_moment_decays_like_the_first(monkeypatch):
    def change(optimizer, model, section):
        for group in optimizer.param_groups:
            group["betas"] = (section.beta1, section.beta1)
        return optimizer

    built_by(monkeypatch, change)


def one_replica_drifts(monkeypatch):
    def change(optimizer, model, section):
        def drift(*args):
            if dist.get_rank() == 1:
                with torch.no_grad():
                    model.norm.weight[0] *= 1 + 2.0**-22

        optimizer.register_step_post_hook(drift)
        return optimizer

    built_by(monkeypatch, change)


def shards_are_all_filled_as_the_first(monkeypatch):
    initialize = importlib.import_module("drumline.models.initialize")  # the room exports a function of its name
    real = initialize._fill_piece

    def first(local, offsets, *rest):
        real(local, (0,) * len(offsets), *rest)

    monkeypatch.setattr(initialize, "_fill_piece", first)


def labels_at_borders_are_dropped(monkeypatch):
    real = ContextSplit.shard_batch

    def drop(self, batch):
        part = real(self, batch)
        part.labels_BT[:, -1] = -100
        return part

    monkeypatch.setattr(ContextSplit, "shard_batch", drop)


def blocks_recompute_something_else(monkeypatch):
    real = checkpointing._Recomputed.__call__

    def other(self, x, *rest):
        forward = self.forward

        def run(x, *rest):
            is_again = torch._C._current_graph_task_id() != -1
            return forward(x * 1.001 if is_again else x, *rest)

        changed = type(self)(run, self.options)
        return real(changed, x, *rest)

    monkeypatch.setattr(checkpointing._Recomputed, "__call__", other)
