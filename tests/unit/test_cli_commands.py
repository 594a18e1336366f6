"""The command line: what it offers, how it fails, what it prints of the configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.durations import seconds_of
from cli.errors import CliError
from cli.reference import configuration_page

VERBS = [
    ["up"],
    ["gateway"],
    ["engine"],
    ["keys", "create"],
    ["keys", "list"],
    ["keys", "show"],
    ["keys", "set"],
    ["keys", "rotate"],
    ["keys", "revoke"],
    ["keys", "usage"],
    ["plans", "list"],
    ["why"],
    ["slow"],
    ["doctor"],
    ["bench", "gap"],
    ["bench", "run"],
    ["bench", "sample"],
    ["bench", "compare"],
    ["bench", "report"],
    ["config", "show"],
    ["config", "reload"],
    ["config", "schema"],
]


@pytest.mark.parametrize("verb", VERBS, ids=" ".join)
def test_every_verb_has_help_with_examples_json_and_exit_codes(tokenline, verb):
    code, out, _ = tokenline(*verb, "--help")
    assert code == 0
    assert "--json" in out
    assert "Example" in out
    assert "Exit codes: 0 success" in out


def test_only_verbs_that_are_built_are_offered(tokenline):
    _, out, _ = tokenline("--help")
    commands = out.split("Commands:")[1].split("Begin with")[0]
    assert [line.split()[0] for line in commands.strip().splitlines()] == [
        "up", "gateway", "engine", "why", "slow", "doctor", "verify", "keys", "plans", "bench", "dashboards", "config",
    ]  # fmt: skip


@pytest.mark.parametrize("group", [[], ["keys"], ["plans"], ["bench"], ["dashboards"], ["config"]], ids=str)
def test_no_line_of_a_list_of_commands_is_cut_short(tokenline, group):
    _, out, _ = tokenline(*group, "--help")
    assert "Commands:" in out
    assert "..." not in out.split("Commands:")[1].split("\n\n")[0]


def test_help_does_not_import_the_heavy_rooms():
    import subprocess
    import sys

    heavy = "('torch', 'transformers', 'fastapi', 'gateway.relay')"
    script = f"import sys, cli.main; print([name for name in {heavy} if name in sys.modules])"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize("arguments", [["config", "show"], ["up"], ["keys", "list"], ["why", "x"]])
def test_a_bad_configuration_is_one_line_and_exit_code_2(tokenline, monkeypatch, arguments):
    monkeypatch.setenv("TOKENLINE_SERVER__PROT", "1")
    code, out, err = tokenline(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith("tokenline: ")
    assert "server.port" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("environ", "arguments", "words"),
    [
        ({"TOKENLINE_ENGINE__BACKEND": "none"}, ["up"], "nothing to answer"),
        ({}, ["gateway"], "[[upstreams]]"),
        ({"TOKENLINE_ENGINE__BACKEND": "none"}, ["up", "--model", "m"], "--model"),
        ({}, ["up", "--device", "gpu"], "--device"),
        ({}, ["up", "--model", " "], "--model is empty"),
        ({"TOKENLINE_ENGINE__TENSOR_PARALLEL_SIZE": "4"}, ["up"], "tensor_parallel_size"),
        ({"TOKENLINE_SERVER__BASE_URL": "http://localhost:1/api"}, ["engine"], "server.base_url"),
        ({}, ["slow", "--window", "soon"], "--window"),
        ({}, ["keys", "create", "--alias", "a", "--expires", "5"], "--expires"),
        ({}, ["why", "x", "--ops-url", "localhost:1"], "--ops-url"),
        ({}, ["why", "x"], "admin key"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(tokenline, monkeypatch, environ, arguments, words):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    code, out, err = tokenline(*arguments)
    assert (code, out) == (2, "")
    assert words in err


def test_config_show_says_where_values_came_from_and_hides_secrets(tokenline, monkeypatch):
    monkeypatch.setenv("TOKENLINE_SERVER__API_KEY", "sk-hush")
    _, out, _ = tokenline("config", "show", "--json")
    keys = json.loads(out)["keys"]
    assert keys["server.api_key"] == {"value": "(set, hidden)", "origin": "TOKENLINE_SERVER__API_KEY"}
    assert keys["server.port"] == {"value": 8080, "origin": "default"}
    _, text, _ = tokenline("config", "show")
    assert "sk-hush" not in out + text
    assert "server.api_key = (set, hidden)   (TOKENLINE_SERVER__API_KEY)" in text


def test_config_schema_prints_every_key(tokenline):
    _, out, _ = tokenline("config", "schema", "--json")
    keys = {entry["key"]: entry for entry in json.loads(out)}
    assert keys["scheduler.max_num_seqs"]["environment"] == "TOKENLINE_SCHEDULER__MAX_NUM_SEQS"
    _, text, _ = tokenline("config", "schema")
    assert [key for key in keys if f"{key} = " not in text] == []


def test_the_configuration_page_is_current():
    page = Path(__file__).parents[2] / "docs" / "configuration.md"
    assert page.read_text(encoding="utf-8") == configuration_page(), "run: make docs"


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("1.5h", 5400), ("30d", 2_592_000), ("2W", 1_209_600)]
)
def test_lengths_of_time_are_read(text, seconds):
    assert seconds_of("--x", text) == seconds


@pytest.mark.parametrize("text", ["", "5", "h", "-1h", "0s", "1 hour", "1h30m"])
def test_what_is_no_length_of_time_is_refused(text):
    with pytest.raises(CliError, match="--x"):
        seconds_of("--x", text)
