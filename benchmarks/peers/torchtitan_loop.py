"""The peer torchtitan 0.3.0 on a CPU: its own trainer, timed a step at a time.

The wheel supports accelerators only. What it asks of one is answered here, at run time; its files stay as they are:
- the device is found by a private function of torch, which says None without an accelerator;
- `torch.cpu` lacks the queries for memory and device that the trainer and its metrics make;
- `torch.distributed.set_timeout` is younger than torch 2.13;
- FSDP2 turns a gradient factor of 1 into a premultiplied sum, which gloo does not have: a plain sum is the same;
- FlexAttention has no backward on a CPU: its calls go to SDPA, causal, which is the cheaper mask.
"""

import os
import resource
import runpy
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed
import torch.nn.functional as F
from torch._utils import _get_device_module
from torch.distributed.fsdp import FSDPModule

sys.path.insert(0, str(Path(__file__).parent))
from result import Result


def be_an_accelerator() -> None:
    """Lets torch.cpu answer as torch.cuda would."""

    def peak() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    def statistics(*_):
        return dict.fromkeys(("active_bytes.all.peak", "reserved_bytes.all.peak"), peak()) | dict.fromkeys(
            ("num_alloc_retries", "num_ooms"), 0
        )

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    answers = {
        "get_device_name": lambda *_: "cpu",
        "get_device_properties": lambda *_: SimpleNamespace(name="cpu", total_memory=total),
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda *_: None,
        "set_device": lambda *_: None,
        "memory_stats": statistics,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
    }
    for name, answer in answers.items():
        if not hasattr(torch.cpu, name):
            setattr(torch.cpu, name, answer)
    torch.cpu.current_device = lambda: 0
    torch._utils._get_available_device_type = lambda: "cpu"
    torch._utils._get_device_module = lambda device: torch.cpu if device == "cpu" else _get_device_module(device)
    if not hasattr(torch.distributed, "set_timeout"):
        torch.distributed.set_timeout = lambda *_, **__: None  # pyright: ignore[reportAttributeAccessIssue]


def sum_plainly() -> None:
    original = FSDPModule.set_gradient_divide_factor

    def set_factor(self, factor):
        original(self, factor)
        self.set_force_sum_reduction_for_comms(True)

    FSDPModule.set_gradient_divide_factor = set_factor


def attend_by_sdpa() -> None:
    from torchtitan.models.common.attention import FlexAttention  # pyright: ignore[reportMissingImports]

    def attend(q, k, v, *, scale=None, enable_gqa=False, **_):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=enable_gqa), None

    FlexAttention._compiled_flex_attn = staticmethod(attend)


def time_steps(skip: int) -> None:
    from torchtitan.trainer import Trainer  # pyright: ignore[reportMissingImports]

    train_step, close = Trainer.train_step, Trainer.close
    wall, cpu, tokens = [], [], []

    def timed(self, batches):
        start, start_cpu, seen = time.perf_counter(), time.process_time(), self.ntokens_seen
        result = train_step(self, batches)
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - start_cpu)
        tokens.append(self.ntokens_seen - seen)
        return result

    def report(self):
        close(self)
        Result(int(tokens[-1]), wall[skip:], cpu[skip:]).emit()

    Trainer.train_step, Trainer.close = timed, report


def main() -> None:
    skip = int(sys.argv.pop(1))
    be_an_accelerator()
    sum_plainly()
    attend_by_sdpa()
    time_steps(skip)
    sys.argv[0] = "torchtitan.train"
    runpy.run_module("torchtitan.train", run_name="__main__")


if __name__ == "__main__":
    main()
