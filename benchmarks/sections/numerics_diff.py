"""Two captures of 1 GiB, each a file of tensors of 32 MiB, of which every element differs, compared in a process of its
own: seconds from opening them to the last measure, and the most memory that the process held.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from harness import Bar

from drumline.capture.files import write
from drumline.capture.parts import Part
from drumline.capture.reading import Manifest
from sections.section import Section

SHAPE = (2048, 4096)
NUM_TENSORS = {False: 32, True: 8}
MOST_S, MOST_BYTES = 10.0, 1 << 30
SCRIPT = """
import json, resource, sys, time
from pathlib import Path
import torch
from drumline.capture.diff import diff
from drumline.capture.reading import Capture
begin = time.perf_counter()
found = diff(Capture(Path(sys.argv[1])), Capture(Path(sys.argv[2])))
seconds = time.perf_counter() - begin
assert len(found.different) == len(found.rows), "every tensor differs"
print(json.dumps({"seconds": seconds, "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}))
"""


def measure(quick: bool) -> Section:
    """Measures; `quick` compares a quarter."""
    num_tensors = NUM_TENSORS[quick]
    share = num_tensors / NUM_TENSORS[False]
    with tempfile.TemporaryDirectory(prefix="drumline-bench-") as name:
        folders = [Path(name, side) for side in "ab"]
        for folder, scale in zip(folders, (1.0, 1.0 + 2.0**-20), strict=True):
            _make(folder, num_tensors, scale)
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, "-c", SCRIPT, *map(str, folders)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    bars = [
        Bar("10 s over the seconds of a comparison of two captures of 1 GiB", MOST_S * share / found["seconds"], 1.0),
        Bar("1 GiB over the memory that it took", MOST_BYTES / found["bytes"], 1.0),
    ]
    size = num_tensors * 4 * SHAPE[0] * SHAPE[1] / 2**30
    table = f"diff: two captures of {size:.2f} GiB, {found['seconds']:.1f} s, {found['bytes'] / 2**20:.0f} MiB"
    return Section(bars, {**found, "gib": size}, table)


def _make(folder: Path, num_tensors: int, scale: float) -> None:
    step = folder / "step-00000001"
    step.mkdir(parents=True)
    generator = torch.Generator().manual_seed(0)
    made = torch.randn(SHAPE, generator=generator).add_(3.0) * scale
    parts = [
        Part(f"1/weight/layers.{index}.mlp.up_proj.weight", SHAPE, made.roll(index, 0), (0, 0))
        for index in range(num_tensors)
    ]
    write(parts, step / "rank-00000.safetensors")
    Manifest({"name": "made"}, "dp1", "tensors", (1,), (), 1, {}).write(folder)
