"""Faults of precision and of single numbers, each a patch: what is rounded where it should not be, a constant that is
off, a bit that flips on one rank.
"""

import torch
import torch.distributed as dist
from tests.mutants.faults import built_by

from drumline.models import attention, decoder, loss, norm
from drumline.models.rope import Rope, rotate
from drumline.train.step import InTurn


def rounded(tensor):
    return tensor.to(torch.bfloat16).to(tensor.dtype)


def softmax_is_in_bf16(monkeypatch):
    """Needs model.attention=sdpa, whose place it takes."""

    def attend(self, q, k, v, rope, mask):
        q, k, v = (x.transpose(1, 2) for x in (rotate(q, rope), rotate(k, rope), v))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5 + mask
        return (scores.to(torch.bfloat16).softmax(-1).to(v.dtype) @ v).transpose(1, 2)

    monkeypatch.setattr(attention.SdpaAttend, "__call__", attend)


def gradients_accumulate_in_bf16(monkeypatch):
    real = InTurn.forward_backward

    def each(self, batches, *rest):
        def round_all(param):
            param.grad.copy_(rounded(param.grad))

        handles = [p.register_post_accumulate_grad_hook(round_all) for p in self.model.parameters()]
        try:
            return real(self, batches, *rest)
        finally:
            for handle in handles:
                handle.remove()

    monkeypatch.setattr(InTurn, "forward_backward", each)


def rotary_tables_are_in_bf16(monkeypatch):
    real = decoder.tables

    def tables(*args):
        rope = real(*args)
        return Rope(rounded(rope.cos_TK2), rounded(rope.sin_TK2))

    monkeypatch.setattr(decoder, "tables", tables)


def epsilon_of_norms_is_tenfold(monkeypatch):
    real = norm.rms_norm
    monkeypatch.setattr(norm, "rms_norm", lambda x, weight, eps: real(x, weight, 10 * eps))


def epsilon_of_the_optimizer_is_tenfold(monkeypatch):
    def change(optimizer, model, section):
        for group in optimizer.param_groups:
            group["eps"] = 10 * section.eps
        return optimizer

    built_by(monkeypatch, change)


def loss_of_one_replica_is_off_by_a_part_in_2_to_the_18(monkeypatch):
    real = InTurn.forward_backward

    def off(self, *args):
        return real(self, *args) * (1 + 2.0**-18 * (dist.get_rank() == 1))

    monkeypatch.setattr(InTurn, "forward_backward", off)


def a_weight_changes_its_sign(monkeypatch):
    after_each_step(monkeypatch, lambda model: model.layers[1].mlp.down_proj.weight[3, 5].neg_())


def a_bit_of_one_replica_flips(monkeypatch):
    def flip(model):
        if dist.get_rank() == 1:
            model.layers[0].mlp_norm.weight.view(torch.int32)[2] ^= 1

    after_each_step(monkeypatch, flip)


def after_each_step(monkeypatch, act):
    def change(optimizer, model, section):
        def hook(*args):
            with torch.no_grad():
                act(model)

        optimizer.register_step_post_hook(hook)
        return optimizer

    built_by(monkeypatch, change)


def residual_stream_is_rounded(monkeypatch):
    real = decoder.Block.forward
    monkeypatch.setattr(decoder.Block, "forward", lambda self, x, *rest: rounded(real(self, x, *rest)))


def logits_are_rounded(monkeypatch):
    real = loss.chunked_cross_entropy

    def make(*args):
        compute = real(*args)
        return lambda hidden, weight, labels: compute(rounded(hidden), weight, labels)

    monkeypatch.setattr(decoder, "chunked_cross_entropy", make)


def second_moment_is_kept_in_bf16(monkeypatch):
    def change(optimizer, model, section):
        def hook(*args):
            for state in optimizer.state.values():
                state["exp_avg_sq"].copy_(rounded(state["exp_avg_sq"]))

        optimizer.register_step_post_hook(hook)
        return optimizer

    built_by(monkeypatch, change)
