"""A gateway's Prometheus page: its figures under the names that are known, whoever's they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

HISTOGRAMS: dict[str, tuple[str, ...]] = {
    "ttft": (
        "gen_ai_server_time_to_first_token_seconds",
        "gen_ai_server_time_to_first_token",
        "litellm_llm_api_time_to_first_token_metric",
        "vllm:time_to_first_token_seconds",
    ),
    "tpot": (
        "gen_ai_server_time_per_output_token_seconds",
        "gen_ai_server_time_per_output_token",
        "vllm:request_time_per_output_token_seconds",
    ),
    "e2e": (
        "gen_ai_server_request_duration_seconds",
        "gen_ai_server_request_duration",
        "gen_ai_client_operation_duration_seconds",
        "litellm_request_total_latency_metric",
        "vllm:e2e_request_latency_seconds",
    ),
}
"""Figure -> names of histograms in seconds; the first that is on the page is read."""
COUNTERS: dict[str, tuple[tuple[str, Mapping[str, str]], ...]] = {
    "input tokens": (
        ("tokenline_tokens_total", {"direction": "input"}),
        ("gen_ai_client_token_usage_sum", {"gen_ai_token_type": "input"}),
        ("litellm_input_tokens_metric_total", {}),
        ("vllm:prompt_tokens_total", {}),
    ),
    "output tokens": (
        ("tokenline_tokens_total", {"direction": "output"}),
        ("gen_ai_client_token_usage_sum", {"gen_ai_token_type": "output"}),
        ("litellm_output_tokens_metric_total", {}),
        ("vllm:generation_tokens_total", {}),
    ),
    "requests": (
        ("tokenline_requests_total", {}),
        ("litellm_proxy_total_requests_metric_total", {}),
    ),
}


class Reading(NamedTuple):
    """Totals over all labels at one moment. Absent: not on the page (a metric may appear with its first sample)."""

    counts: dict[str, float]
    """Histogram's figure -> how many samples; counter's figure -> its value."""
    sums: dict[str, float]
    """Histogram's figure -> sum of its samples, seconds."""
    names: dict[str, str]

    def since(self, before: Reading) -> Reading:
        """What was added after `before`."""
        counts = {name: value - before.counts.get(name, 0) for name, value in self.counts.items()}
        sums = {name: value - before.sums.get(name, 0) for name, value in self.sums.items()}
        return Reading(counts, sums, self.names)


def read_page(text: str) -> Reading:
    """The known figures of a page in Prometheus's text format. Raises ValueError on one that is broken."""
    totals: dict[str, list[tuple[Mapping[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if not sample.name.endswith(("_bucket", "_created")):
                totals.setdefault(sample.name, []).append((sample.labels, sample.value))
    reading = Reading({}, {}, {})
    for figure, names in HISTOGRAMS.items():
        name = next((name for name in names if f"{name}_count" in totals), None)
        if name is not None:
            reading.names[figure] = name
            reading.counts[figure] = sum(value for _, value in totals[f"{name}_count"])
            reading.sums[figure] = sum(value for _, value in totals.get(f"{name}_sum", ()))
    for figure, candidates in COUNTERS.items():
        for name, wanted in candidates:
            if name in totals:
                reading.names[figure] = name
                matching = (value for labels, value in totals[name] if wanted.items() <= labels.items())
                reading.counts[figure] = sum(matching)
                break
    return reading


class MetricsPage:
    """The page at one address."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url = url
        self._session = session

    async def read(self) -> Reading:
        """Raises ConnectionError that names the address when it can't be read."""
        try:
            async with self._session.get(self._url, headers={"accept": "text/plain"}) as answer:
                text = await answer.text()
                if answer.status != 200:
                    raise ConnectionError(f"{self._url} answers with status {answer.status}")
            return read_page(text)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise ConnectionError(f"{self._url} can't be read as a Prometheus page: {error}") from error
