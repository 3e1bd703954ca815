"""What spreading the work costs and gains, one section a claim.

(a) ring attention over two ranks: at least 0.85 times the speed of full attention on one rank with the same cores,
    and at least that of torch's own ring.
(b) pipelines: the bubble of each schedule within 10 % of the simulated one, at 4 ranks and 8 and 16 micro-batches;
    `--quick` takes 8.
(c) sequence parallelism: what a block keeps for its backward falls by the degree.
(d) async tensor parallelism: a step at least not slower than with plain collectives.

    python benchmarks/parallel.py [--quick] [--json] [--only a,...]
"""

from harness import finish, parser, say
from sections import async_tensor, pipeline_bubble, ring_attention, sequence_memory

SECTIONS = {
    "a": ring_attention.measure,
    "b": pipeline_bubble.measure,
    "c": sequence_memory.measure,
    "d": async_tensor.measure,
}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--only", default=",".join(SECTIONS), help="sections, by letter")
    o = options.parse_args()
    bars, details, tables = [], {}, []
    for letter in o.only.split(","):
        say(f"section {letter}")
        section = SECTIONS[letter](o.quick)
        bars += section.bars
        details[letter] = section.details
        tables.append(section.table)
    return finish(bars, {"sections": details}, "\n".join(tables), o.json)


if __name__ == "__main__":
    raise SystemExit(main())
