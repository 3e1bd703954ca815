"""Training speed on a CPU: `drumline train llama3-debug` beside a plain loop around transformers and beside torchtitan.

Same shapes (6.2 M parameters), sequence 512, two sequences a step, two threads, one process; fp32 and bf16. Each
turn is a fresh process; contestants alternate, and a ratio is the median of ratios within rounds. drumline runs its
whole platform with the default recipe: real data, document masks, metrics, a run directory; its step time is the
time between rows of metrics.jsonl. Bars: tokens/s at least 1.3 times the plain loop's and 1.2 times torchtitan's,
in both dtypes.

    python benchmarks/train_throughput.py [--quick] [--json] [--dtypes fp32,bf16] [--rounds N] [--steps N]
    [KEY=VALUE ...]
"""

import itertools
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

import torch
from harness import Bar, alternate, finish, median_of, paired_ratio, parser, say
from peers.result import Result, read
from peers.torchtitan_install import PeerMissingError, ensure

from drumline.planner import flops_per_token
from drumline.recipe import load
from drumline.train.peak import measure_matmul

HERE = Path(__file__).parent
THREADS, SEQ_LEN, BATCH, SKIP = 2, 512, 2, 3
BARS = {"transformers": 1.3, "torchtitan": 1.2}
ENVIRONMENT = {
    "OMP_NUM_THREADS": str(THREADS),
    "OMP_WAIT_POLICY": "passive",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
TURN_TIMEOUT_S = 900


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--dtypes", default="fp32,bf16")
    options.add_argument("--rounds", type=int)
    options.add_argument("--steps", type=int, help="measured steps a turn")
    options.add_argument("--peers", type=Path, default=Path.home() / ".cache/drumline/peers", help="where peers live")
    options.add_argument("overrides", nargs="*", help="recipe overrides for drumline's turns")
    o = options.parse_args()
    num_rounds, num_steps = o.rounds or (1 if o.quick else 5), o.steps or (6 if o.quick else 20)

    missing = ""
    try:
        say("torchtitan: looking for its environment, else installing it (some minutes)")
        titan = ensure(o.peers / "torchtitan-0.3.0")
    except PeerMissingError as error:
        titan, missing = None, f"torchtitan does not install here: {error}"
        say(missing)

    bars, dtypes, tables = [], {}, []
    for dtype in o.dtypes.split(","):
        contestants = {
            "drumline": partial(run_drumline, dtype, num_steps, o.overrides),
            "transformers": partial(run_transformers, dtype, num_steps),
        }
        if titan is not None:
            contestants["torchtitan"] = partial(run_torchtitan, titan, o.peers / "torchtitan-0.3.0", dtype, num_steps)
        rounds = alternate(contestants, num_rounds)
        speed = [{name: result.tokens_per_s for name, result in row.items()} for row in rounds]
        for peer, bar in BARS.items():
            ratio = paired_ratio(speed, "drumline", peer) if peer in contestants else None
            bars.append(Bar(f"{dtype} tokens/s over {peer}", ratio, bar, missing if ratio is None else ""))
        peak = measure_peak(dtype)
        dtypes[dtype] = {
            "gemm_peak_flops": peak,
            "tokens_per_s": {name: median_of(speed, name) for name in contestants},
            "mfu": {name: median_of(speed, name) * flops_a_token() / peak for name in contestants},
            "rounds": [{name: vars(result) for name, result in row.items()} for row in rounds],
        }
        tables.append(table_of(dtype, dtypes[dtype]))
    return finish(bars, {"dtypes": dtypes}, "\n".join(tables), o.json)


def run_drumline(dtype: str, num_steps: int, overrides: list[str]) -> Result:
    """One turn of the real command, in a fresh run directory."""
    with tempfile.TemporaryDirectory(prefix="drumline-bench-") as folder:
        settings = [
            f"run.dir={folder}/run",
            f"run.steps={SKIP + num_steps + 1}",
            f"run.threads={THREADS}",
            f"data.seq_len={SEQ_LEN}",
            f"data.micro_batch={BATCH}",
            f"data.global_batch={BATCH}",
            f"precision.compute={dtype}",
            *overrides,
        ]
        call([sys.executable, "-m", "drumline", "train", "llama3-debug", "--nproc", "1", *settings])
        rows = [json.loads(line) for line in Path(folder, "run", "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["kind"] == "step"][SKIP:]
    wall = [after["time"] - before["time"] for before, after in itertools.pairwise(steps)]
    return Result(BATCH * SEQ_LEN, wall, [])


def run_transformers(dtype: str, num_steps: int) -> Result:
    """One turn of the plain loop."""
    model = load("llama3-debug", []).model
    sizes = {
        "steps": num_steps,
        "skip": SKIP,
        "threads": THREADS,
        "batch": BATCH,
        "seq_len": SEQ_LEN,
        "vocab": model.vocab_size,
        "dim": model.dim,
        "hidden": model.hidden_dim,
        "layers": model.num_layers,
        "heads": model.num_heads,
        "kv_heads": model.num_kv_heads,
    }
    flags = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    return result_of([sys.executable, str(HERE / "peers/transformers_loop.py"), *flags, "--dtype", dtype])


def run_torchtitan(python: Path, folder: Path, dtype: str, num_steps: int) -> Result:
    """One turn of torchtitan's trainer on its debug model, whose shapes llama3-debug has."""
    flags = {
        "--module": "llama3",
        "--config": "llama3_debugmodel",
        "--training.steps": str(SKIP + num_steps),
        "--training.local_batch_size": str(BATCH),
        "--training.seq_len": str(SEQ_LEN),
        "--training.mixed_precision_param": {"fp32": "float32", "bf16": "bfloat16"}[dtype],
        "--parallelism.spmd_backend": "partial_dtensor",
    }
    launch = [str(python), "-m", "torch.distributed.run", "--nproc_per_node=1", "--rdzv_backend=c10d"]
    script = ["--rdzv_endpoint=localhost:0", str(HERE / "peers/torchtitan_loop.py"), str(SKIP)]
    rest = ["--training.disable_cuda_graphs", "--checkpoint.no-enable", "activation-checkpoint:none"]
    return result_of([*launch, *script, *(part for pair in flags.items() for part in pair), *rest], folder)


def result_of(command: list[str], folder: Path | None = None) -> Result:
    """What a peer's process measured."""
    output = call(command, folder)
    result = read(output)
    if result is None:
        raise SystemExit(f"no result from {' '.join(command)}\n{output[-4000:]}")
    return result


def call(command: list[str], folder: Path | None = None) -> str:
    """Runs a turn to its end and returns its stdout."""
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **ENVIRONMENT}, capture_output=True, text=True, timeout=TURN_TIMEOUT_S
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} ended with {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        )
    return done.stdout


def flops_a_token() -> float:
    """Floating-point operations of forward and backward a token, by the trainer's own count."""
    return flops_per_token(load("llama3-debug", []).model, SEQ_LEN).total


def measure_peak(dtype: str) -> float:
    """FLOP/s of a large matmul, by the trainer's own function."""
    torch.set_num_threads(THREADS)
    return measure_matmul(torch.bfloat16 if dtype == "bf16" else torch.float32, torch.device("cpu"), 1.0)


def table_of(dtype: str, figures: dict) -> str:
    """The figures of one dtype for a reader."""
    lines = [f"{dtype}: GEMM peak {figures['gemm_peak_flops'] / 1e9:.0f} GFLOP/s"]
    for name, speed in figures["tokens_per_s"].items():
        each = " ".join(
            f"{result['tokens_per_step'] / sorted(result['wall_s'])[len(result['wall_s']) // 2]:.0f}"
            for result in (row[name] for row in figures["rounds"])
        )
        lines.append(f"  {name:13} {speed:7.0f} tokens/s   MFU {figures['mfu'][name]:5.1%}   rounds {each}")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(main())
