"""What spreading the work costs and gains, one section a claim.

(a) ring attention over two ranks: at least 0.85 times the speed of full attention on one rank with the same cores,
    and at least that of torch's own ring.
(b) pipelines: the bubble of each schedule within 10 % of the simulated one, at 4 ranks and 8 and 16 micro-batches;
    `--quick` takes 8.
(c) sequence parallelism: what a block keeps for its backward falls by the degree.
(d) async tensor parallelism: a step at least not slower than with plain collectives.

    python benchmarks/parallel.py [--quick] [--json] [--only a,...]
"""

from sections import async_tensor, pipeline_bubble, ring_attention, sequence_memory
from sections.section import run_sections

SECTIONS = {
    "a": ring_attention.measure,
    "b": pipeline_bubble.measure,
    "c": sequence_memory.measure,
    "d": async_tensor.measure,
}


if __name__ == "__main__":
    raise SystemExit(run_sections(__doc__, SECTIONS))
