"""The shipped collector configuration: it is YAML, every part that is named is there, and it fits our receiver."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from settings.schema import ServerSettings, TracingSettings
from tracing.observer import otlp

CONFIG = Path(__file__).parents[2] / "deploy" / "collector" / "config.yaml"


@pytest.fixture
def config() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    return loaded


def test_every_part_of_the_pipeline_is_defined_and_used(config: dict[str, Any]) -> None:
    (pipeline,) = config["service"]["pipelines"].values()
    for kind in ("receivers", "processors", "exporters"):
        assert set(pipeline[kind]) == set(config[kind])


def test_it_takes_grpc_and_sends_what_our_receiver_takes(config: dict[str, Any]) -> None:
    assert list(config["receivers"]["otlp"]["protocols"]) == ["grpc"]
    exporter = config["exporters"]["otlp_http/tokenline"]
    assert exporter["traces_endpoint"].endswith(f":{ServerSettings().otlp_port}/v1/traces}}")
    assert (exporter["encoding"], exporter["compression"]) == ("proto", "gzip")
    assert exporter["headers"]["authorization"].startswith("Bearer ${env:TOKENLINE_OTLP_TOKEN")


def test_batches_are_within_the_receivers_limits_and_spans_come_while_requests_wait(config: dict[str, Any]) -> None:
    assert config["processors"]["batch"]["send_batch_max_size"] <= otlp.MAX_SPANS
    waits_ms = TracingSettings().join_wait_ms
    assert _ms(config["processors"]["batch"]["timeout"]) < waits_ms / 10
    assert _ms(config["exporters"]["otlp_http/tokenline"]["retry_on_failure"]["max_elapsed_time"]) <= waits_ms


def _ms(text: str) -> float:
    return float(text.removesuffix("ms")) if text.endswith("ms") else float(text.removesuffix("s")) * 1e3
