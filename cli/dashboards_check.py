"""Runs the check of dashboards and rules: gateway, engine, load and Prometheus, all for this one time."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import msgspec

from cli.errors import CliError, Exit
from cli.output import console, say
from cli.temporary import TemporaryLine, temporary_line
from dashboards.checks.load import MIN_REQUESTS, Load
from dashboards.checks.pictures import board_picture
from dashboards.checks.questions import Question, lint, panel_questions, rule_questions
from dashboards.checks.run import Answer, ask, exemplar_traces, rule_errors
from dashboards.checks.server import Prometheus, PrometheusMissing, QueryFailed, prometheus_program, running_prometheus
from dashboards.grafana.files import boards
from dashboards.prometheus.files import prometheus_files, scrape_configuration
from dashboards.prometheus.promql import Windows
from dashboards.prometheus.recording import FIGURES
from dashboards.sources import Places, default_places
from dashboards.yaml import yaml_text
from settings.schema import Settings

SCRAPE_SECONDS = 1.0
SETTLE_SECONDS = 4.0
"""After the load: the last scrapes, and rules evaluated on them."""
WINDOWS = Windows()
Report = dict[str, Any]


def run_check(settings: Settings, *, seconds: float, pictures: Path | None) -> Report:
    """{panels, queries, empty, errors, lint, ...}. Raises CliError when a part can't be started."""
    places = default_places(settings)
    faults = lint(settings, places, WINDOWS)
    try:
        prometheus_program()
    except PrometheusMissing as error:
        raise CliError(str(error), Exit.USAGE) from error
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="tokenline-dashboards-") as folder, temporary_line() as line:
        scraped = msgspec.structs.replace(places, targets=(line.ops_url.removeprefix("http://"),), alertmanagers=())
        configuration = _write_configuration(Path(folder), settings, scraped)
        try:
            with running_prometheus(configuration, Path(folder) / "data") as prometheus:
                report = _asked(prometheus, line, settings, places, seconds, pictures)
        except (RuntimeError, QueryFailed) as error:
            raise CliError(str(error)) from error
    return report | {"lint": faults, "seconds": round(time.monotonic() - began, 1)}


def _write_configuration(folder: Path, settings: Settings, places: Places) -> Path:
    for name, text in prometheus_files(settings, places, WINDOWS).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    configuration = folder / "prometheus" / "prometheus.yml"
    configuration.write_text(yaml_text(scrape_configuration(places, seconds=SCRAPE_SECONDS)))
    return configuration


def _asked(
    prometheus: Prometheus,
    line: TemporaryLine,
    settings: Settings,
    places: Places,
    seconds: float,
    pictures: Path | None,
) -> Report:
    load = Load(line.base_url, keys=_keys(line), models=line.models, seconds=seconds, least=MIN_REQUESTS)
    start = time.time()
    say(f"asking the gateway for {seconds:g} s")
    load.run()
    time.sleep(SETTLE_SECONDS)
    end = time.time()
    panels = panel_questions(places)
    questions = [*panels, *rule_questions(settings, WINDOWS)]
    say(f"asking Prometheus {len(questions)} questions")
    answers = [ask(prometheus, question, start, end, SCRAPE_SECONDS) for question in questions]
    traces = exemplar_traces(prometheus, f"{FIGURES['ttft']}_bucket", start, end)
    errors = [f"{answer.question.place}: {answer.error}" for answer in answers if answer.error]
    errors += rule_errors(prometheus)
    errors += _exemplar_errors(line, traces)
    if pictures is not None:
        _draw(pictures, places, answers)
    return {
        "panels": sum(len(board.panels) for board in boards(places)),
        "queries": len(questions),
        "requests": load.sent,
        "exemplars": len(traces),
        "empty": [_told(answer.question) for answer in answers if _is_fault(answer)],
        "excused": {
            answer.question.place: answer.question.may_be_empty
            for answer in answers
            if answer.is_empty and not answer.error and answer.question.may_be_empty
        },
        "errors": errors,
    }


def _is_fault(answer: Answer) -> bool:
    return answer.is_empty and not answer.error and not answer.question.may_be_empty


def _told(question: Question) -> str:
    return f"{question.place}: {question.expr}"


def _keys(line: TemporaryLine) -> dict[str, str]:
    """Keys of two teams, and one that is soon beyond its limit."""
    found = {"free": line.key}
    for name, asked in (
        ("other", {"alias": "other", "team": "search"}),
        ("limited", {"alias": "limited", "team": "trial", "limits": {"requests_per_minute": 3}}),
    ):
        answer = httpx.post(
            f"{line.ops_url}/admin/v1/keys",
            json=asked,
            headers={"authorization": f"Bearer {line.admin_key}"},
            timeout=10,
            trust_env=False,
        )
        if answer.status_code != 201:
            raise CliError(f"the gateway made no key for the check: {answer.text[:200]}")
        found[name] = answer.json()["secret"]
    return found


def _exemplar_errors(line: TemporaryLine, traces: list[str]) -> list[str]:
    """An exemplar must lead to its request."""
    if not traces:
        return ["no exemplar was stored: heat maps have no dots to click"]
    answer = httpx.get(
        f"{line.ops_url}/admin/v1/requests/{traces[0]}",
        headers={"authorization": f"Bearer {line.admin_key}"},
        timeout=10,
        trust_env=False,
    )
    return [] if answer.status_code == 200 else [f"exemplar {traces[0]} leads to no request: {answer.text[:200]}"]


def _draw(folder: Path, places: Places, answers: list[Answer]) -> None:
    by_expression = {answer.question.expr: answer for answer in answers}
    folder.mkdir(parents=True, exist_ok=True)
    for board in boards(places):
        (folder / f"{board.uid}.svg").write_text(board_picture(board, by_expression))


def show_report(report: Report) -> None:
    """For people."""
    out = console()
    out.print(
        f"{report['panels']} panels, {report['queries']} queries, {report['requests']} requests, "
        f"{report['exemplars']} exemplars, {report['seconds']} s"
    )
    for kind, told in (("empty", "no result"), ("errors", "error"), ("lint", "fault")):
        for fault in report[kind]:
            out.print(f"{told}: {fault}")
    for place, why in report["excused"].items():
        if why != "an alert is empty unless it fires":
            out.print(f"empty, and may be: {place} ({why})")
    if not (report["empty"] or report["errors"] or report["lint"]):
        out.print("all is well")
