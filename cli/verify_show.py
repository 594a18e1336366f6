"""What `verify` prints of a report."""

from __future__ import annotations

from typing import Any

import msgspec
from rich.table import Table
from rich.text import Text

from cli.output import say
from cli.tables import print_whole
from loadtest.conformance.finding import Finding, Report

STYLES = {"pass": "green", "fail": "bold red", "skip": "dim"}


def as_builtins(report: Report) -> dict[str, Any]:
    """The report for programs."""
    found: dict[str, Any] = msgspec.to_builtins(report)
    results = [finding.result for finding in report.findings]
    summary = {"passed": results.count("pass"), "failed": results.count("fail"), "skipped": results.count("skip")}
    return {"ok": not report.failed, **summary, **found}


def show_report(report: Report) -> None:
    """One table, and a line that sums it up."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
    for name in ("case", "check", "result", "seen", "wanted"):
        table.add_column(name, overflow="fold")
    case = ""
    for finding in report.findings:
        shown = "" if finding.case == case else finding.case
        case = finding.case
        table.add_row(
            shown, finding.check, Text(finding.result, STYLES[finding.result]), _seen(finding), finding.wanted
        )
    print_whole(table)
    if report.published:
        say("read on the page: " + ", ".join(f"{figure} as {name}" for figure, name in report.published.items()))
    passed = sum(finding.result == "pass" for finding in report.findings)
    say(f"{passed} of {len(report.findings)} passed, {len(report.failed)} failed")


def _seen(finding: Finding) -> str:
    if finding.off_ms is None:
        return finding.seen
    return f"{finding.seen}, wrong by {finding.off_ms:+.1f} ms"
