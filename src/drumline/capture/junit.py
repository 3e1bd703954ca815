"""Verdicts of a gate as JUnit XML, which continuous integration shows: a suite a capture, a case a tensor and tier.

Source: https://github.com/testmoapp/junitxml, the format as tools read it.
"""

from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as Xml

from drumline.capture.gate import Verdict
from drumline.recipe.errors import DrumlineError


def write_junit(verdicts: Sequence[Verdict], path: Path) -> None:
    """Writes verdicts.

    Args:
        verdicts: one a capture.
        path: of the file.

    Raises:
        DrumlineError: it cannot be written.
    """
    total = sum(len(verdict.checks) for verdict in verdicts)
    failed = sum(len(verdict.failed) for verdict in verdicts)
    root = Xml.Element("testsuites", name="drumline numerics gate", tests=str(total), failures=str(failed))
    for verdict in verdicts:
        suite = Xml.SubElement(
            root,
            "testsuite",
            name=f"{verdict.folder} ({verdict.layout}, {verdict.precision})",
            tests=str(len(verdict.checks) + len(verdict.skipped)),
            failures=str(len(verdict.failed)),
            skipped=str(len(verdict.skipped)),
        )
        for check in verdict.checks:
            case = Xml.SubElement(suite, "testcase", classname=f"tier {check.tier}", name=check.key)
            if check.why:
                Xml.SubElement(case, "failure", message=f"{check.key} {check.why}", type=f"tier {check.tier}")
        for tier, reason in verdict.skipped:
            case = Xml.SubElement(suite, "testcase", classname=f"tier {tier}", name=f"tier {tier}")
            Xml.SubElement(case, "skipped", message=reason)
    Xml.indent(root)
    try:
        Xml.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)
    except OSError as error:
        raise DrumlineError(f"{path} cannot be written: {error.strerror}; name another file with --junit") from error
