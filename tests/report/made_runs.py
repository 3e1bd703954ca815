"""Run directories as the trainer writes them, made up: rows with the trainer's keys, commits by the real saver."""

import json
import math
import random
from pathlib import Path

import torch

from drumline.checkpoint import Saver, whole
from drumline.recipe import Recipe


def write_run(
    folder: Path,
    *,
    num_steps: int = 200,
    seed: int = 0,
    overrides: dict | None = None,
    commits: tuple[int, ...] = (),
    resumed_at: tuple[int, ...] = (),
    end: str | None = "done",
    has_mfu: bool = True,
    moe_layers: tuple[int, ...] = (),
    dropped: float = 0.0,
) -> list[dict]:
    """Writes a run directory; gives back its rows."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe = Recipe.model_validate({"name": "made-up", **(overrides or {})})
    (folder / "recipe.json").write_text(recipe.model_dump_json(indent=2))
    environment = {
        "python": "3.11.7",
        "packages": {"torch": "2.13.0"},
        "world_size": 2,
        "command": ["train", "made-up"],
    }
    (folder / "environment.json").write_text(json.dumps(environment))
    rows = list(_rows(random.Random(seed), num_steps, commits, resumed_at, end, has_mfu))
    for row in rows if moe_layers else ():
        if row["kind"] == "step":
            row["router"] = _router(moe_layers, row["step"], dropped)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if commits:
        with Saver(folder / "checkpoints", asynchronous=False, keep=99, direct=False) as saver:
            for step in commits:
                saver.save(step, [whole("model.weight", torch.arange(1000.0))], {"step": step})
    return rows


def _router(layers, step, dropped):
    return {
        "layers": list(layers),
        "load_max": [1.5 + layer + 1 / step for layer in layers],
        "load_min": [0.5 / (1 + layer) for layer in layers],
        "entropy": [2.0 - 0.1 * layer for layer in layers],
        "dropped": [dropped * layer for layer in layers],
    }


def _rows(draw, num_steps, commits, resumed_at, end, has_mfu):
    time = 1_780_000_000.0
    start = {"kind": "start", "step": 0, "layout": "dp2", "world": 2, "resumed_from": None}
    yield {**start, "time": time}
    yield {"kind": "validation", "step": 0, "loss": 7.62, "loss_hex": (7.62).hex(), "num_tokens": 4096, "time": time}
    for step in range(1, num_steps + 1):
        if step - 1 in resumed_at:
            yield {**start, "step": step - 1, "resumed_from": f"checkpoints/step-{step - 1:08}", "time": time}
        loss = 2.2 + 5.4 * math.exp(-step / 60) + draw.gauss(0, 0.08)
        step_s = 0.5 + draw.expovariate(20)
        time += step_s
        yield {
            "kind": "step",
            "step": step,
            "loss": loss,
            "loss_hex": loss.hex(),
            "grad_norm": 0.6 + 3 * math.exp(-step / 20) + draw.expovariate(8),
            "lr": 3e-3 * min(step / 20, 1.0, max((num_steps - step) / (num_steps / 5), 0.0)),
            "num_tokens": 4080,
            "tokens_per_s": 4096 / step_s,
            "mfu": 0.41 * 0.5 / step_s if has_mfu else None,
            "memory_bytes": 1_300_000_000 + 200_000 * step,
            "step_s": step_s,
            "time": time,
        }
        if step % 50 == 0:
            yield {"kind": "validation", "step": step, "loss": 2.3 + 5.3 * math.exp(-step / 60), "time": time}
        if step in commits:
            path = f"checkpoints/step-{step:08}"
            yield {
                "kind": "commit",
                "step": step,
                "path": path,
                "num_bytes": 74_000_000,
                "stall_s": 0.031,
                "time": time,
            }
    if end:
        yield {"kind": "end", "step": num_steps, "reason": end, "time": time}
