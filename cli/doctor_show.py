"""What `doctor` prints of a report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
STYLES = {"ok": "green", "warn": "bold yellow", "fail": "bold red", "skip": "dim"}
SHOWN: dict[Language, dict[str, str]] = {
    "en": {"ok": "ok", "warn": "warn", "fail": "FAIL", "skip": "-"},
    "zh": {"ok": "正常", "warn": "注意", "fail": "失败", "skip": "-"},
}
WORDS: dict[Language, dict[str, str]] = {
    "en": {
        "asked": "Asked: {url} ({surface}, model {model})",
        "nobody": "Nobody could be asked.",
        "well": "All is well.",
        "sum": "To change: {fails} failed, {warns} may give trouble.",
        "after": "Then run `tokenline doctor` again.",
    },
    "zh": {
        "asked": "检查的是：{url}（{surface}，模型 {model}）",
        "nobody": "没有可以询问的服务。",
        "well": "一切正常。",
        "sum": "需要修改：{fails} 项失败，{warns} 项可能带来麻烦。",
        "after": "修改后请再次运行 `tokenline doctor`。",
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
    for finding in report.findings:
        yield from _finding(finding, language, cells)
    yield Text()
    asked = words["asked"].format(url=report.used_base_url, surface=report.surface, model=report.model or "-")
    for line in wrapped(asked if report.used_base_url else words["nobody"], cells):
        yield Text(line)
    if not report.troubles:
        yield Text(words["well"], STYLES["ok"])
        return
    fails = sum(finding.result == "fail" for finding in report.troubles)
    yield Text(words["sum"].format(fails=fails, warns=len(report.troubles) - fails), STYLES["fail"])
    yield Text(words["after"])


def _finding(finding: Finding, language: Language, cells: int) -> Iterator[Text]:
    name_cells = max(map(len, CHECKS)) + 1
    indent = 5 + name_cells
    seen, fix = words_of(finding, language)
    mark = SHOWN[language][finding.result]
    first, *more = wrapped(seen, cells - indent)
    style = STYLES[finding.result]
    head = Text(mark + " " * (5 - Text(mark).cell_len), style)
    quiet = "dim" if finding.result == "skip" else ""
    yield head + Text(f"{finding.check:{name_cells}}", quiet) + Text(first, quiet)
    for line in more:
        yield Text(" " * indent + line, quiet)
    for number, line in enumerate(wrapped(fix, cells - indent - 3)):
        yield Text(" " * indent + ("-> " if number == 0 else "   ") + line, "bold")
