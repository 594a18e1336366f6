"""What `doctor` prints of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import msgspec
from rich.console import Console
from rich.text import Text

from cli.language import Language
from cli.output import console
from cli.wrap import wrapped
from loadtest.doctor.finding import CHECKS, RESULTS, Finding, Report
from loadtest.doctor.texts import words_of

MAX_CELLS = 120
AFTER = "after"
"""The code of a check that could not be made."""
STYLES = {"ok": "green", "warn": "bold yellow", "fail": "bold red", "skip": "dim"}
SHOWN: dict[Language, dict[str, str]] = {
    "en": {"ok": "ok", "warn": "warn", "fail": "FAIL", "skip": "-"},
    "zh": {"ok": "正常", "warn": "注意", "fail": "失败", "skip": "-"},
}
WORDS: dict[Language, dict[str, str]] = {
    "en": {
        "works": "It answers with base_url {url}, model {model}.",
        "well": "All is well.",
        "open": "Nothing is wrong, but not all could be looked at.",
        "sum": "To change: failures {fails}, warnings {warns}. Then run `tokenline doctor` again.",
    },
    "zh": {
        "works": "用 base_url {url}、模型 {model} 可以得到回答。",
        "well": "一切正常。",
        "open": "没有发现问题，但有些项目无法检查。",
        "sum": "需要修改：失败 {fails} 项，注意 {warns} 项。修改后请再次运行 `tokenline doctor`。",
    },
}


@contextmanager
def progress_line() -> Iterator[Callable[[str], None]]:
    """A line on a terminal's standard error that says what is being looked at; gone at the end."""
    with Console(stderr=True, markup=False, highlight=False).status("looking") as status:
        yield lambda check: status.update(f"looking at {check}")


def as_builtins(report: Report, language: Language) -> dict[str, Any]:
    """The report for programs: every finding with its words beside its code."""
    found: dict[str, Any] = msgspec.to_builtins(report)
    results = [finding.result for finding in report.findings]
    for finding, shown in zip(report.findings, found["findings"], strict=True):
        shown["seen"], shown["fix"] = words_of(finding, language)
    counts = {result: results.count(result) for result in RESULTS}
    return {"ok": not report.troubles, "counts": counts, **found}


def show_report(report: Report, language: Language) -> None:
    """A line for each check, the fix below it where there is one, and a sum."""
    out = console()
    for line in lines_of(report, language, cells=min(out.width, MAX_CELLS)):
        out.print(line, no_wrap=True, overflow="ellipsis")


def lines_of(report: Report, language: Language, *, cells: int) -> Iterator[Text]:
    """The page, line by line."""
    words = WORDS[language]
    for finding, checks in _grouped(report.findings):
        yield from _finding(finding, ", ".join(checks), language, cells)
    yield Text()
    is_answered = any(finding.check == "answer" and finding.result in ("ok", "warn") for finding in report.findings)
    if is_answered:
        for line in wrapped(words["works"].format(url=report.used_base_url, model=report.model), cells):
            yield Text(line)
    if report.troubles:
        fails = sum(finding.result == "fail" for finding in report.troubles)
        summed = words["sum"].format(fails=fails, warns=len(report.troubles) - fails)
        for line in wrapped(summed, cells):
            yield Text(line, STYLES["fail" if fails else "warn"])
    else:
        yield Text(words["well" if is_answered else "open"], STYLES["ok" if is_answered else "warn"])


def _grouped(findings: list[Finding]) -> Iterator[tuple[Finding, list[str]]]:
    """Findings with their checks; neighbours that were not made for the same reason are one line."""
    for _, same in groupby(
        findings, key=lambda finding: (finding.code, finding.values, finding.code != AFTER and finding)
    ):
        group = list(same)
        yield group[0], [finding.check for finding in group]


def _finding(finding: Finding, checks: str, language: Language, cells: int) -> Iterator[Text]:
    name_cells = max(map(len, CHECKS)) + 1
    indent = 5 + name_cells
    seen, fix = words_of(finding, language)
    name, seen = (finding.check, seen) if checks == finding.check else ("", f"{checks}: {seen}")
    mark = SHOWN[language][finding.result]
    first, *more = wrapped(seen, cells - indent)
    style = STYLES[finding.result]
    head = Text(mark + " " * (5 - Text(mark).cell_len), style)
    quiet = "dim" if finding.result == "skip" else ""
    yield head + Text(f"{name:{name_cells}}", quiet) + Text(first, quiet)
    for line in more:
        yield Text(" " * indent + line, quiet)
    for number, line in enumerate(wrapped(fix, cells - indent - 3)):
        yield Text(" " * indent + ("-> " if number == 0 else "   ") + line, "bold")
