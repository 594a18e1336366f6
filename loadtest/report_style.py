"""What a report looks like: one palette, for the page in light and dark and for pictures on white."""

from __future__ import annotations

_LIGHT = ("#3465c9", "#d9822b", "#1f9e77", "#8b5bd1", "#c4456b", "#5f6b7a", "#a3851a", "#2a9bbf")
_DARK = ("#7da7ff", "#f0a35a", "#4fd1a5", "#b79bf5", "#f0809f", "#a4afbd", "#d8b84a", "#66c8e6")
"""Told apart by people who see few colours: they differ in lightness too; lines that lie together are dashed."""


def _series(colours: tuple[str, ...]) -> str:
    return "".join(
        f".s{n}.line{{stroke:{colour}}}.s{n}.bar,.s{n}.dot,.s{n}.area{{fill:{colour}}}"
        for n, colour in enumerate(colours)
    )


_SHAPES = """
.line{fill:none;stroke-width:2;stroke-linejoin:round}.dot{fill-opacity:.5}.area{fill-opacity:.14}
.title{font:600 15px system-ui,-apple-system,"Segoe UI",sans-serif}.note{font:12px system-ui,sans-serif}
.tick,.key{font:12px system-ui,-apple-system,"Segoe UI",sans-serif}
"""

PICTURE = f"""
{_SHAPES}{_series(_LIGHT)}
.title,.key{{fill:#18202c}}.tick,.note{{fill:#5b6675}}.grid{{stroke:#e3e7ee}}.axis{{stroke:#aab3c0}}.band{{fill:#eef2f9}}
text{{font-family:"DejaVu Sans","Liberation Sans",Arial,sans-serif !important}}
"""
"""Of one chart as a picture."""

PAGE = f"""
:root{{color-scheme:light dark;--ink:#18202c;--soft:#5b6675;--line:#e3e7ee;--axis:#aab3c0;--page:#f6f7fa;--card:#fff;
--band:#eef2f9;--good:#1a7f4f;--watch:#a35c00;--bad:#b3261e}}
@media(prefers-color-scheme:dark){{:root{{--ink:#e6eaf0;--soft:#9aa6b5;--line:#2a3240;--axis:#4b5668;--page:#10141b;
--card:#181e28;--band:#1f2735;--good:#57c98f;--watch:#f0b25a;--bad:#ff8a80}}}}
*{{box-sizing:border-box}}
body{{margin:0;background:var(--page);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}}
main{{max-width:1180px;margin:0 auto;padding:2rem 1.25rem 3rem}}
h1{{font-size:1.7rem;margin:.1rem 0;overflow-wrap:anywhere}}h2{{font-size:1.05rem;margin:0 0 .7rem}}
.kind{{margin:0;color:var(--soft);font-size:.85rem}}
.facts{{margin:.1rem 0 1.2rem;color:var(--soft);overflow-wrap:anywhere}}
section,figure{{background:var(--card);border:1px solid var(--line);border-radius:10px}}
section{{padding:1.1rem 1.25rem;margin:0 0 1rem;min-width:0}}
.cards{{display:grid;grid-template-columns:repeat(auto-fit,minmax(135px,1fr));gap:.6rem 1rem}}
.card span{{display:block;color:var(--soft);font-size:.8rem}}
.card b{{font-size:1.55rem;font-weight:650;font-variant-numeric:tabular-nums}}
.card i{{font:normal .85rem system-ui,sans-serif;color:var(--soft);margin-left:.2rem}}
.of{{margin:-.5rem 0 1rem .2rem;color:var(--soft);font-size:.85rem}}
.verdict{{list-style:none;margin:0;padding:0}}
.verdict li{{padding:.3rem 0 .3rem 1.5rem;position:relative;overflow-wrap:anywhere}}
.verdict li::before{{position:absolute;left:.2rem;content:"·";font-weight:700}}
.verdict .good::before{{content:"✓";color:var(--good)}}.verdict .watch::before{{content:"▲";color:var(--watch)}}
.verdict .bad::before{{content:"✕";color:var(--bad)}}.verdict .bad{{color:var(--bad)}}
.said{{color:var(--soft);font:13px ui-monospace,monospace}}
.wide{{overflow-x:auto}}table{{border-collapse:collapse;font-variant-numeric:tabular-nums;min-width:100%}}
th,td{{padding:.32rem .7rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}}
th{{color:var(--soft);font-weight:500;font-size:.85rem}}th:first-child,td:first-child{{text-align:left;padding-left:0}}
tbody tr:last-child td{{border-bottom:0}}.words{{color:var(--soft);font-size:.85rem;margin:.6rem 0 0}}
.drawn{{background:none;border:0;padding:0}}.drawn h2{{margin:1.4rem 0 .7rem}}
.charts{{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,500px),1fr));gap:1rem}}
figure{{margin:0;padding:1rem 1.1rem .4rem;overflow-x:auto}}svg{{display:block;width:100%;min-width:460px;height:auto}}
.over-time{{display:grid;grid-template-columns:minmax(0,1fr);gap:1rem;margin-top:1rem}}.over-time svg{{min-width:800px}}
footer{{color:var(--soft);font-size:.82rem}}
dl{{display:grid;grid-template-columns:max-content 1fr;gap:.15rem 1rem;margin:1rem 0}}
dd{{margin:0;overflow-wrap:anywhere}}
@media(max-width:520px){{main{{padding:1.1rem .7rem 2rem}}section{{padding:.9rem}}dl{{grid-template-columns:1fr}}
dt{{font-weight:600}}.card b{{font-size:1.3rem}}.cards{{grid-template-columns:repeat(2,1fr)}}}}
@media print{{figure,section{{break-inside:avoid}}}}
{_SHAPES}{_series(_LIGHT)}@media(prefers-color-scheme:dark){{{_series(_DARK)}}}
.title,.key{{fill:var(--ink)}}.tick,.note{{fill:var(--soft)}}.grid{{stroke:var(--line)}}.axis{{stroke:var(--axis)}}
.band{{fill:var(--band)}}
"""
"""Of the whole page."""
