"""Writing the /metrics page: what prometheus_client writes, byte for byte, in a fraction of its time.

The library escapes and formats every one of some 40,000 lines anew. Here what is the same for all buckets of a series
is written once, numbers that come again are taken from a table, and what needs no escaping is not looked at letter by
letter. It is for families as ours are: legal names, no timestamps, no native histograms. For scrapers that want names
translated, the library's encoder is called.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.samples import Exemplar

from tracing.observer.histogram import Histogram, HistogramFamily, number_text

OPENMETRICS = "application/openmetrics-text"
_TRANSLATED_NAMES = ("escaping=dots", "escaping=values")
_KINDS = frozenset({"counter", "gauge", "histogram", "info"})
_TEXT_SUFFIXES = {"counter": "_total", "info": "_info"}
"""In the older text format these are part of a family's name."""


def encoder_for(accept: str) -> tuple[Callable[[CollectorRegistry], bytes], str]:
    """What writes a registry as `accept` asks, and the content type."""
    encode, content_type = choose_encoder(accept)
    if any(escaping in content_type for escaping in _TRANSLATED_NAMES):
        return encode, content_type
    is_openmetrics = content_type.startswith(OPENMETRICS)
    return lambda registry: write(registry, openmetrics=is_openmetrics), content_type


def write(registry: CollectorRegistry, *, openmetrics: bool) -> bytes:
    """The page of a registry in OpenMetrics or in the older text format."""
    page = _Page(openmetrics)
    for family in registry.collect():
        page.add(family)
    return page.end()


class _Page:
    def __init__(self, openmetrics: bool) -> None:
        self._openmetrics = openmetrics
        self._parts: list[str] = []
        self._counts: dict[int, str] = {}

    def end(self) -> bytes:
        """The whole page."""
        if self._openmetrics:
            self._parts.append("# EOF\n")
        return "".join(self._parts).encode()

    def add(self, family: Metric) -> None:
        """One family, with its help and type."""
        if family.type not in _KINDS:
            raise ValueError(f"metric {family.name} is a {family.type}, which is not written here")
        name, kind = family.name, family.type
        if not self._openmetrics:
            name += _TEXT_SUFFIXES.get(kind, "")
            kind = "gauge" if kind == "info" else kind
        self._parts.append(f"# HELP {name} {self._help(family.documentation)}\n# TYPE {name} {kind}\n")
        if isinstance(family, HistogramFamily):
            self._histogram(family.histogram)
            return
        for sample in family.samples:
            labels = ",".join(f'{key}="{_escaped(value)}"' for key, value in sorted(sample.labels.items()))
            braced = f"{{{labels}}}" if labels else ""
            exemplar = _exemplar(sample.exemplar) if sample.exemplar is not None and self._openmetrics else ""
            self._parts.append(f"{sample.name}{braced} {number_text(sample.value)}{exemplar}\n")

    def _histogram(self, histogram: Histogram) -> None:
        """Labels stand in the order of the alphabet, `le` among them."""
        name, names = histogram.metric.name, histogram.metric.labels
        add = self._parts.append
        for values, observed in histogram.series():
            pairs = sorted((key, f'{key}="{_escaped(value)}"') for key, value in zip(names, values, strict=True))
            head = f"{name}_bucket{{" + "".join(pair + "," for key, pair in pairs if key < "le") + 'le="'
            tail = '"' + "".join("," + pair for key, pair in pairs if key > "le") + "} "
            reached = "0.0"
            exemplars = dict(observed.exemplars) if self._openmetrics else {}
            for number, (edge, count) in enumerate(
                zip(histogram.edges, accumulate(list(observed.counts)), strict=True)
            ):
                reached = self._count(count)
                if number in exemplars:
                    add(f"{head}{edge}{tail}{reached}{_exemplar(exemplars[number])}\n")
                else:
                    add(f"{head}{edge}{tail}{reached}\n")
            joined = ",".join(pair for _, pair in pairs)
            braced = f"{{{joined}}}" if joined else ""
            add(f"{name}_count{braced} {reached}\n{name}_sum{braced} {number_text(observed.total)}\n")

    def _count(self, count: int) -> str:
        text = self._counts.get(count)
        if text is None:
            text = self._counts[count] = number_text(count)
        return text

    def _help(self, text: str) -> str:
        escaped = text.replace("\\", r"\\").replace("\n", r"\n")
        return escaped.replace('"', r"\"") if self._openmetrics else escaped


def _escaped(value: str) -> str:
    if "\\" in value or '"' in value or "\n" in value:
        return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
    return value


def _exemplar(exemplar: Exemplar) -> str:
    labels = ",".join(f'{name}="{_escaped(value)}"' for name, value in sorted(exemplar.labels.items()))
    when = "" if exemplar.timestamp is None else f" {exemplar.timestamp}"
    return f" # {{{labels}}} {number_text(exemplar.value)}{when}"
