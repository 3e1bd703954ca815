"""What keeping bits costs, one section a claim.

exact_tp: a step of exact mode in fixed pieces, two tensor-parallel ranks, beside the default's: at least 0.4 times its
    speed with 2 blocks, 0.2 with 4.

    python benchmarks/numerics.py [--quick] [--json] [--only exact_tp,...]
"""

from harness import finish, parser, say
from sections import exact_tp

SECTIONS = {"exact_tp": exact_tp.measure}


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
