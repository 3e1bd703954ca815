"""What keeping bits costs, one section a claim.

(invariance) batch-invariant operators: at most 1.1 times the time of torch's, forward and backward, from 64 tokens on.

    python benchmarks/numerics.py [--quick] [--json] [--only invariance,...]
"""

from harness import finish, parser, say
from sections import invariance

SECTIONS = {
    "invariance": invariance.measure,
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
