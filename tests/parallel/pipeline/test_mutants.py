"""The comparison with one device catches the faults that pipelines are known for."""

import pytest
import torch
import torch.distributed as dist
from tests.parallel.pipeline.test_pipeline import DENSE, EXPERTS, FURTHER, TIED, check_step
from tests.ranks import ranks

from drumline.parallel.gradients import Alone, Several
from drumline.parallel.pipeline import build, stage
from drumline.parallel.pipeline.model import TiedAcrossRanks
from drumline.parallel.pipeline.stage import Stage
from drumline.parallel.place import Place


def stages_in_wrong_order(monkeypatch):
    right = build.stage_layers
    monkeypatch.setattr(build, "stage_layers", lambda *args: tuple(reversed(right(*args))))


def norm_misses_a_stage(monkeypatch):
    right = Alone.counted
    monkeypatch.setattr(Alone, "counted", lambda self: right(self) if dist.get_rank() == 0 else [])


def tied_embedding_is_counted_twice(monkeypatch):
    monkeypatch.setattr(Place, "is_first", lambda self, mesh: True)


def tied_gradient_is_not_summed(monkeypatch):
    monkeypatch.setattr(TiedAcrossRanks, "finish", Several.finish)


def tied_gradient_is_summed_twice(monkeypatch):
    right = TiedAcrossRanks.finish

    def finish(self):
        right(self)
        right(self)

    monkeypatch.setattr(TiedAcrossRanks, "finish", finish)


def only_the_last_micro_batch_is_kept(monkeypatch):
    right = Stage.backward

    def backward(self, action, grad_BTD):
        for param in self.part.parameters():
            param.grad = None
        return right(self, action, grad_BTD)

    monkeypatch.setattr(Stage, "backward", backward)


def weight_gradients_of_a_split_backward_are_lost(monkeypatch):
    monkeypatch.setattr(stage, "stage_backward_weight", lambda *args, **options: None)


def balancing_loss_is_dropped(monkeypatch):
    right = stage.call

    def call(*args, **options):
        found = right(*args, **options)
        return (found[0], 0 * found[1]) if isinstance(found, tuple) else found

    monkeypatch.setattr(stage, "call", call)


def balancing_loss_is_not_divided(monkeypatch):
    right = stage.call

    def call(*args, **options):
        found = right(*args, **options)
        return (found[0], found[1] * 32) if isinstance(found, tuple) else found

    monkeypatch.setattr(stage, "call", call)


def gradients_reach_the_wrong_micro_batch(monkeypatch):
    right = Stage.backward

    def backward(self, action, grad_BTD):
        return right(self, action, None if grad_BTD is None else grad_BTD.roll(1, 0))

    monkeypatch.setattr(Stage, "backward", backward)


@pytest.mark.parametrize(
    ("fault", "model", "schedule"),
    [
        (stages_in_wrong_order, DENSE, "1f1b"),
        (norm_misses_a_stage, DENSE, "1f1b"),
        (tied_embedding_is_counted_twice, TIED, "1f1b"),
        (tied_gradient_is_not_summed, TIED, "1f1b"),
        (tied_gradient_is_summed_twice, TIED, "1f1b"),
        (tied_gradient_is_not_summed, FURTHER, "1f1b"),
        (only_the_last_micro_batch_is_kept, DENSE, "gpipe"),
        (only_the_last_micro_batch_is_kept, DENSE, "zb-h1"),
        (weight_gradients_of_a_split_backward_are_lost, DENSE, "zb-h1"),
        (balancing_loss_is_dropped, EXPERTS, "1f1b"),
        (balancing_loss_is_not_divided, EXPERTS, "zb-h1"),
        (gradients_reach_the_wrong_micro_batch, DENSE, "1f1b"),
    ],
)
def test_the_comparison_catches(fault, model, schedule, monkeypatch):
    fault(monkeypatch)

    @ranks(2)
    def body():
        try:
            check_step(model, 3, pp=2, pp_schedule=schedule)
            caught = 0
        except AssertionError:
            caught = 1
        total = torch.tensor([caught])
        dist.all_reduce(total)
        assert total.item() > 0

    body()
