"""Charts as PNG pictures, for slides and chats that take no SVG."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from loadtest.charts import charts_of
from loadtest.plot import draw
from loadtest.report_style import PICTURE

ZOOM = 2.0
"""Pixels for one unit of a chart."""


class NoPictures(Exception):
    """Pictures can't be made here; says what is missing."""


def save_pictures(run: dict[str, Any], folder: Path, stem: str) -> list[Path]:
    """One `STEM-CHART.png` for each chart of the run that has data. Raises NoPictures or OSError."""
    _check_fonts()
    files = []
    for name, chart in charts_of(run).items():
        if svg := draw(chart):
            file = folder / f"{stem}-{name}.png"
            file.write_bytes(picture(svg))
            files.append(file)
    return files


def picture(svg: str) -> bytes:
    """A chart on white, as PNG."""
    import resvg_py

    return bytes(resvg_py.svg_to_bytes(svg_string=svg, style_sheet=PICTURE, background="#ffffff", zoom=ZOOM))


def _check_fonts() -> None:
    """A picture without letters would be one that nobody can read."""
    frame = '<svg xmlns="http://www.w3.org/2000/svg" width="20" height="20">{}</svg>'
    if picture(frame.format('<text x="2" y="16">M</text>')) == picture(frame.format("")):
        raise NoPictures("no font is installed that pictures could be lettered with (fonts-dejavu-core is enough)")
