"""The shipped collector configurations: YAML, every part that is named is there, and they fit what is around them."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from deploy_rig import COMPOSE, DEPLOY, compose

from settings.schema import ServerSettings, SloSettings, TracingSettings
from tracing import semconv
from tracing.ledger import Outcome
from tracing.observer import otlp

FOLDER = DEPLOY / "collector"
SECTIONS = ("receivers", "processors", "exporters")


def load(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((FOLDER / name).read_text())
    return loaded


@pytest.fixture
def config() -> dict[str, Any]:
    return load("config.yaml")


@pytest.fixture
def sampling() -> dict[str, Any]:
    return load("sampling.yaml")


@pytest.mark.parametrize("name", ["config.yaml", "sampling.yaml", "balancing.yaml"])
def test_every_part_of_the_pipeline_is_defined_and_used(name: str) -> None:
    config = load(name)
    (pipeline,) = config["service"]["pipelines"].values()
    for kind in SECTIONS:
        assert set(pipeline[kind]) == set(config[kind])
    assert pipeline["processors"][0].startswith("memory_limiter")


def test_the_two_that_run_in_one_collector_share_no_name(config: dict[str, Any], sampling: dict[str, Any]) -> None:
    for kind in SECTIONS:
        assert not set(config[kind]) & set(sampling[kind])
    assert not set(config["service"]["pipelines"]) & set(sampling["service"]["pipelines"])
    command = compose()["collector"]["command"]
    assert command == [f"--config=/etc/collector/{name}" for name in ("config.yaml", "sampling.yaml")]


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


def test_sampling_keeps_what_failed_or_missed_its_objective_by_names_that_spans_have(sampling: dict[str, Any]) -> None:
    policies = {policy["name"]: policy for policy in sampling["processors"]["tail_sampling"]["policies"]}
    assert all(policy["type"] in policy for policy in policies.values())
    failed = policies["refused-or-failed"]["string_attribute"]
    assert failed["key"] == semconv.OUTCOME
    assert set(failed["values"]) <= {str(outcome) for outcome in Outcome}
    slow = [policies[name]["ottl_condition"]["span"][0] for name in ("slow-first-token", "slow-tokens", "unaccounted")]
    read = [re.fullmatch(r'attributes\["([\w.]+)"\] > ([\d.]+)', condition) for condition in slow]
    named = [(found[1], float(found[2])) for found in read if found]
    slo = SloSettings()
    assert named[:2] == [(semconv.TTFT, slo.ttft_ms / 1e3), (semconv.TPOT, slo.tpot_ms / 1e3)]
    assert named[2][0] == semconv.UNACCOUNTED
    waits_ms = TracingSettings().join_wait_ms
    assert _ms(sampling["processors"]["tail_sampling"]["decision_wait"]) > waits_ms


def test_variables_of_the_collectors_are_given_in_compose(config: dict[str, Any], sampling: dict[str, Any]) -> None:
    given = set(compose()["collector"]["environment"]) | {"TOKENLINE_OTLP_TOKEN"}  # by secrets/collector.env
    assert "TOKENLINE_OTLP_TOKEN=" in (COMPOSE / "make-secrets.sh").read_text()
    read = {name for text in (str(config), str(sampling)) for name in re.findall(r"\$\{env:(\w+)", text)}
    assert read == given


def _ms(text: str) -> float:
    return float(text.removesuffix("ms")) if text.endswith("ms") else float(text.removesuffix("s")) * 1e3
