"""`tokenline dashboards`: what it writes, what it says, what it draws; the page of metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path
from xml.etree import ElementTree

import pytest
import yaml
from typer.testing import CliRunner

from cli import dashboards_check
from cli.errors import CliError
from cli.main import app
from cli.metrics_page import metrics_page
from dashboards.checks.pictures import board_picture, value_text
from dashboards.checks.questions import Question
from dashboards.checks.run import Answer, ask
from dashboards.checks.server import PrometheusMissing, QueryFailed
from dashboards.grafana.files import boards
from dashboards.sources import default_places
from settings.schema import Settings
from tracing.metrics import CATALOGUE

DOCS = Path(__file__).parents[2] / "docs"
RUNNER = CliRunner()


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TOKENLINE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("TOKENLINE_CONFIG", raising=False)


def test_build_writes_thresholds_and_places_that_were_asked_for(tmp_path: Path) -> None:
    (tmp_path / "tokenline.toml").write_text("[slo.default]\nttft_ms = 750\n")
    asked = ["--target", "a:9464", "--target", "b:9464", "--grafana-url", "https://g/", "--tempo-url", "http://t:3200"]
    done = RUNNER.invoke(app, ["dashboards", "build", "--out", "made", *asked, "--json"])
    assert done.exit_code == 0, done.output
    assert all(Path(name).is_file() for name in json.loads(done.stdout)["files"])
    configuration = yaml.safe_load(Path("made/prometheus/prometheus.yml").read_text())
    assert configuration["scrape_configs"][0]["static_configs"] == [{"targets": ["a:9464", "b:9464"]}]
    rules = Path("made/prometheus/rules/tokenline-alerts.yml").read_text()
    assert "p95_rate5m > 0.75" in rules
    assert '"https://g/d/tokenline-overview' in rules
    assert "tokenline-tempo" in Path("made/grafana/provisioning/datasources/tokenline.yml").read_text()


def test_a_scale_that_makes_no_sense_is_refused() -> None:
    done = RUNNER.invoke(app, ["dashboards", "build", "--window-scale", "0"])
    assert isinstance(done.exception, CliError)
    assert "--window-scale 0" in str(done.exception)


def test_a_machine_without_prometheus_is_told_how_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing() -> str:
        raise PrometheusMissing("apt-get install prometheus")

    monkeypatch.setattr(dashboards_check, "prometheus_program", missing)
    with pytest.raises(CliError, match="apt-get install prometheus"):
        dashboards_check.run_check(Settings(state_dir=tmp_path), seconds=10, pictures=None)


def test_the_page_of_metrics_is_current_and_complete() -> None:
    page = (DOCS / "metrics.md").read_text()
    assert page == metrics_page(), "run: make docs"
    assert [metric.name for metric in CATALOGUE if f"| `{metric.name}` | {metric.kind} |" not in page] == []


class Answering:
    """Stands for a Prometheus: remembers what it was asked."""

    def __init__(self, series: list[dict[str, object]] | None = None, error: str = "") -> None:
        self.asked: list[str] = []
        self._series = series or []
        self._error = error

    def instant(self, expr: str, at: float) -> list[dict[str, object]]:
        return self.line(expr, at, at)

    def line(self, expr: str, start: float, end: float) -> list[dict[str, object]]:
        self.asked.append(expr)
        if self._error:
            raise QueryFailed(self._error)
        return self._series


def test_variables_are_filled_in_before_a_query_is_asked() -> None:
    prometheus = Answering()
    expr = 'rate(a{model=~"$model",upstream=~"$upstream",surface=~"$surface"}[$__rate_interval])'
    ask(prometheus, Question("p", expr, False), 0, 60, 1)
    ask(prometheus, Question("p", "increase(a[$__range])", True), 0, 60, 1)
    assert prometheus.asked == ['rate(a{model=~".*",upstream=~".*",surface=~".*"}[15s])', "increase(a[60s])"]


def test_no_number_is_an_empty_answer_and_an_error_is_told() -> None:
    question = Question("p", "a", True, legend="{{model}} {{slo}}")
    assert ask(Answering(), question, 0, 60, 1).is_empty
    assert ask(Answering([{"metric": {}, "value": [1, "NaN"]}]), question, 0, 60, 1).is_empty
    full = ask(Answering([{"metric": {"model": "m", "slo": "ttft"}, "value": [1, "0"]}]), question, 0, 60, 1)
    assert not full.is_empty
    assert full.series == [("m ttft", [(1.0, 0.0)])]
    assert ask(Answering(error="parse error"), question, 0, 60, 1).error == "parse error"


def test_a_picture_has_the_panels_that_have_numbers() -> None:
    board = boards(default_places(Settings(state_dir=Path("/nowhere"))))[0]
    panel = next(panel for panel in board.panels if panel.title.startswith("TTFT P50"))
    line = [("P<95>", [(0.0, 0.1), (60.0, 0.4), (61.0, math.nan)])]
    answers = {panel.queries[0].expr: Answer(Question("p", panel.queries[0].expr, False), line)}
    picture = board_picture(board, answers)
    ElementTree.fromstring(picture)  # noqa: S314  our own text
    assert picture.count("<polyline") == 1
    assert "TTFT P50, P95, P99" in picture
    assert "P&lt;95&gt;" in picture
    assert "Errors" not in picture


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(0.123, "s", "123 ms"), (0.0000123, "s", "12.3 µs"), (2.5, "s", "2.5 s"), (0.995, "percentunit", "99.5 %"),
     (12.3, "reqps", "12.3/s"), (123456.0, "short", "123,456"), (0.0, "s", "0 s")],
)  # fmt: skip
def test_numbers_are_written_with_their_units(value: float, unit: str, text: str) -> None:
    assert value_text(value, unit) == text
