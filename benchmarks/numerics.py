"""What numbers that do not depend on the layout cost, one section a claim.

exact_step   a training step in exact mode, dp and fsdp on two ranks, of the shapes of a Llama of 125 million
             parameters: at least 0.85 times the speed of the default step. `--quick` takes one of its twelve layers
             and a twelfth of its vocabulary.
tree_reduce  an all-reduce in the order of the tree on four ranks, from 32 MiB on: at least 0.9 times the speed of
             gloo's, whose order is the ranks', and no byte more than a ring sends.

    python benchmarks/numerics.py [--quick] [--json] [--only exact_step,...]
"""

from harness import finish, parser, say
from sections import exact_step, tree_reduce

SECTIONS = {
    "exact_step": exact_step.measure,
    "tree_reduce": tree_reduce.measure,
}


def main() -> int:
    options = parser(__doc__)
    options.add_argument("--only", default=",".join(SECTIONS), help="sections, by name")
    o = options.parse_args()
    bars, details, tables = [], {}, []
    for name in o.only.split(","):
        say(f"section {name}")
        section = SECTIONS[name](o.quick)
        bars += section.bars
        details[name] = section.details
        tables.append(section.table)
    return finish(bars, {"sections": details}, "\n".join(tables), o.json)


if __name__ == "__main__":
    raise SystemExit(main())
