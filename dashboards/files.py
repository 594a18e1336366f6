"""Every file that is made, as text by path below one folder."""

from __future__ import annotations

from pathlib import Path

from dashboards.grafana.files import grafana_files
from dashboards.prometheus.files import prometheus_files
from dashboards.prometheus.promql import Windows
from dashboards.sources import Places
from settings.schema import Settings


def all_files(settings: Settings, places: Places, windows: Windows) -> dict[str, str]:
    """Path -> text."""
    return prometheus_files(settings, places, windows) | grafana_files(places)


def write_files(folder: Path, files: dict[str, str]) -> None:
    """Writes them all, making folders as needed."""
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
