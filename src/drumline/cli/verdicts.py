"""How verdicts of the numerics gate are printed."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from drumline.cli.output import print_table

if TYPE_CHECKING:
    from drumline.capture.gate import Verdict

TIERS = ("A", "B", "C", "D")
MAX_LINES = 5


def tell(verdicts: Sequence["Verdict"]) -> None:
    """Prints verdicts for people.

    Args:
        verdicts: one a capture.
    """
    rows = []
    for verdict in verdicts:
        for tier in TIERS:
            checks = [check for check in verdict.checks if check.tier == tier]
            if not checks:
                continue
            num_failed, worst = sum(bool(check.why) for check in checks), verdict.worst(tier)
            value, limit = (f"{worst.value:.3g}", f"{worst.limit:.3g}") if worst and worst.limit else ("", "")
            key = worst.key if worst and worst.limit else ""
            outcome = "pass" if not num_failed else f"{num_failed:,} FAIL"
            rows.append((verdict.folder, verdict.layout, verdict.precision, tier, outcome, value, limit, key))
    columns = ("capture", "layout", "precision", "tier", "outcome", "worst", "limit", "at")
    print_table(columns, rows, numeric=("worst", "limit"))
    for verdict in verdicts:
        for tier, reason in verdict.skipped:
            typer.echo(f"{verdict.folder}: tier {tier} did not run: {reason}")
        for key, count in verdict.flips:
            typer.echo(f"{verdict.folder}: {count} tokens of {key} go to other experts than in fp64, by rounding alone")
        if verdict.unjudged:
            typer.echo(
                f"{verdict.folder}: {verdict.unjudged} tensors come after a flip and are not judged; capture with "
                f"--force-routing to judge them"
            )
        failed = verdict.failed
        if failed:
            typer.echo(f"{verdict.folder}: {len(failed)} checks fail; the first, in the order of a step:")
            for check in failed[:MAX_LINES]:
                typer.echo(f"  {check.key} {check.why}   [tier {check.tier}]")
    num_good = sum(verdict.passes for verdict in verdicts)
    typer.echo(f"{num_good} of {len(verdicts)} captures pass")


def document(verdicts: Sequence["Verdict"]) -> dict[str, Any]:
    """Verdicts as JSON values."""
    return {
        "passes": all(verdict.passes for verdict in verdicts),
        "captures": [
            {
                **asdict(verdict),
                "passes": verdict.passes,
                "first": verdict.failed[0].key if verdict.failed else "",
            }
            for verdict in verdicts
        ],
    }
