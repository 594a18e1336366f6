"""Pictures of panels as SVG, drawn from what their queries answered: lines, and bars for numbers of a whole range."""

from __future__ import annotations

import math
from html import escape

from dashboards.checks.run import Answer
from dashboards.grafana.board import Board
from dashboards.grafana.panel import Panel

WIDTH, HEIGHT, GAP, LEGEND = 420, 230, 14, 46
LEFT, TOP = 58, 30
COLOURS = ("#3b6fb6", "#d0812b", "#3d8b57", "#b8434e", "#7a5fa8", "#7d6550", "#c46aa6", "#5f6b76", "#a3a02c", "#2b9aa8")
MAX_SERIES = 8
Line = tuple[str, list[tuple[float, float]]]


def board_picture(board: Board, answers: dict[str, Answer], *, columns: int = 3) -> str:
    """The panels that have numbers, side by side. `answers` are by expression."""
    drawn = [(panel, _lines(panel, answers)) for panel in board.panels if panel.kind != "heatmap"]
    drawn = [(panel, lines) for panel, lines in drawn if lines]
    rows = math.ceil(len(drawn) / columns)
    width, height = columns * (WIDTH + GAP) + GAP, rows * (HEIGHT + GAP) + GAP
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="#f4f5f5"/>',
    ]
    for number, (panel, lines) in enumerate(drawn):
        x, y = GAP + number % columns * (WIDTH + GAP), GAP + number // columns * (HEIGHT + GAP)
        parts.append(f'<g transform="translate({x} {y})">{_panel(panel, lines)}</g>')
    return "\n".join([*parts, "</svg>", ""])


def _lines(panel: Panel, answers: dict[str, Answer]) -> list[Line]:
    found = [
        (name or "value", [(at, value) for at, value in points if math.isfinite(value)])
        for query in panel.queries
        if query.expr in answers
        for name, points in answers[query.expr].series
    ]
    return [line for line in found if line[1]]


def _panel(panel: Panel, lines: list[Line]) -> str:
    frame = f'<rect width="{WIDTH}" height="{HEIGHT}" rx="3" fill="#fff" stroke="#d8d9da"/>'
    title = f'<text x="12" y="19" font-weight="600" fill="#222">{escape(panel.title)}</text>'
    is_line = any(len(points) > 1 for _, points in lines)
    body = _chart(panel, lines) if is_line else _bars(panel, lines)
    return frame + title + body


def _chart(panel: Panel, lines: list[Line]) -> str:
    lines = sorted(lines, key=lambda line: -max(value for _, value in line[1]))[:MAX_SERIES]
    start = min(at for _, points in lines for at, _ in points)
    end = max(max(at for _, points in lines for at, _ in points), start + 1)
    top = panel.maximum or max(value for _, points in lines for _, value in points) * 1.08 or 1.0
    if panel.unit == "percentunit":
        top = min(top, 1.0)
    wide, high = WIDTH - LEFT - 14, HEIGHT - TOP - LEGEND
    parts = []
    for share in (0, 0.5, 1):
        y = TOP + high * (1 - share)
        parts.append(f'<line x1="{LEFT}" x2="{LEFT + wide}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e6e7e8"/>')
        label = value_text(top * share, panel.unit)
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#666">{label}</text>')
    for number, (name, points) in enumerate(lines):
        colour = COLOURS[number % len(COLOURS)]
        path = " ".join(
            f"{LEFT + (at - start) / (end - start) * wide:.1f},{TOP + high * (1 - min(value / top, 1)):.1f}"
            for at, value in points
        )
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        x, y = 12 + number % 4 * 102, HEIGHT - LEGEND + 22 + number // 4 * 15
        parts.append(f'<rect x="{x}" y="{y - 8}" width="8" height="8" fill="{colour}"/>')
        parts.append(f'<text x="{x + 12}" y="{y}" fill="#444">{escape(name[:15])}</text>')
    return "".join(parts)


def _bars(panel: Panel, lines: list[Line]) -> str:
    values = sorted(((name, points[-1][1]) for name, points in lines), key=lambda pair: -pair[1])[:MAX_SERIES]
    top = panel.maximum or max(value for _, value in values) or 1.0
    high = min(22.0, (HEIGHT - TOP - 12) / len(values))
    parts = []
    for number, (name, value) in enumerate(values):
        y = TOP + 4 + number * high
        long = max(1.0, 190 * min(value / top, 1))
        parts.append(
            f'<text x="136" y="{y + high * 0.66:.1f}" text-anchor="end" fill="#444">{escape(name[-21:])}</text>'
        )
        parts.append(f'<rect x="142" y="{y + 2:.1f}" width="{long:.1f}" height="{high - 4:.1f}" fill="{COLOURS[0]}"/>')
        text = value_text(value, panel.unit)
        parts.append(f'<text x="{148 + long:.1f}" y="{y + high * 0.66:.1f}" fill="#222">{text}</text>')
    return "".join(parts)


def value_text(value: float, unit: str) -> str:
    """A number with its unit, in three figures."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s" and value and abs(value) < 1:
        return f"{value * 1e3:.3g} ms" if abs(value) >= 1e-3 else f"{value * 1e6:.3g} µs"
    suffix = {"s": " s", "reqps": "/s"}.get(unit, "")
    return f"{value:.3g}{suffix}" if abs(value) < 1000 else f"{value:,.0f}{suffix}"
