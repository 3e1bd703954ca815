"""What it costs to look at numbers, one section a claim.

capture  a step that is recorded: at most 1.10 times a step where hashes are kept, 2 times where tensors are; nothing at
         all where nothing is recorded.
diff     two captures of 1 GiB each, of which every element differs, compared by every measure in less than 10 s and
         1 GiB of memory; `--quick` takes a quarter of each.

    python benchmarks/numerics.py [--quick] [--json] [--only capture,...]
"""

from harness import finish, parser, say
from sections import numerics_capture, numerics_diff

SECTIONS = {
    "capture": numerics_capture.measure,
    "diff": numerics_diff.measure,
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
