"""`tokenline keys` and `plans`: what they do to the store, and what they print."""

from __future__ import annotations

import json

import pytest

from cli.errors import Exit
from gateway.keys.store import KeyStore


def test_a_key_is_created_listed_and_revoked(tokenline, state):
    code, out, _ = tokenline("keys", "create", "--alias", "app", "--models", "a, b", "--expires", "30d", "--json")
    made = json.loads(out)
    assert code == 0
    assert made["secret"].startswith("sk-tl-")
    assert made["models"] == ["a", "b"]
    assert KeyStore(state / "keys.sqlite").list()[0].expires_ns == made["expires_ns"]
    _, out, _ = tokenline("keys", "list")
    assert "app" in out
    assert "works until" in out
    assert made["secret"] not in out
    _, out, _ = tokenline("keys", "revoke", "app")
    assert out == f"{made['id']} app: revoked\n"
    _, out, _ = tokenline("keys", "list", "--json")
    assert json.loads(out)["keys"][0]["revoked_ns"]


def test_the_secret_alone_is_on_standard_output(tokenline):
    _, out, err = tokenline("keys", "create", "--alias", "app")
    assert out.startswith("sk-tl-")
    assert out.count("\n") == 1
    assert "not shown again" in err


def test_a_key_with_a_plan_and_limits_is_made_shown_and_rotated(tokenline, state, tmp_path):
    (tmp_path / "tokenline.toml").write_text("[plans.free]\nrequests_per_minute = 60\n")
    limits = ("--rpm", "5", "--tpm", "6", "--concurrency", "7", "--daily", "8", "--monthly", "9")
    code, out, _ = tokenline(
        "keys", "create", "--alias", "app", "--plan", "free", *limits, "--tags", "web, blue", "--json"
    )
    made = json.loads(out)
    assert (code, made["plan"], made["tags"]) == (0, "free", ["web", "blue"])
    assert list(made["limits"].values()) == [5, 6, 7, 8, 9]
    _, out, _ = tokenline("keys", "rotate", "app", "--grace", "1h", "--json")
    rotated = json.loads(out)
    assert rotated["secret"] != made["secret"]
    assert rotated["previous_until_ns"] - rotated["rotated_ns"] == 3600 * 10**9
    _, out, _ = tokenline("keys", "show", "app")
    assert "5 requests/min" in out
    assert "old secret until" in out
    assert json.loads(tokenline("keys", "show", "app", "--json")[1])["id"] == made["id"]
    assert json.loads(tokenline("plans", "list", "--json")[1])["plans"][0]["limits"] == {"requests_per_minute": 60}
    assert "60 requests/min" in tokenline("plans", "list")[1]
    code, _, err = tokenline("keys", "create", "--alias", "b", "--plan", "gone")
    assert code == Exit.FAILURE
    assert "add a table [plans.gone]" in err
    assert "take one of free" in err
    assert tokenline("keys", "create", "--alias", "b", "--rpm", "0")[0] == Exit.USAGE


def test_usage_is_shown_by_key(tokenline, state):
    from tracing.clock import SystemClock
    from tracing.ledger import Ledger, Usage
    from tracing.observer.usage import UsageBook

    assert "no key was used" in tokenline("keys", "usage")[2]
    book = UsageBook(state / "usage.sqlite", SystemClock())
    used = Usage(input_tokens=10, output_tokens=4, source="usage")
    book.add(Ledger("r", "t", "s", SystemClock().wall_ns(), 1, key_alias="app", team="red", model="m", usage=used))
    book.flush()
    _, out, _ = tokenline("keys", "usage", "--window", "1h", "--json")
    (row,) = json.loads(out)["usage"]
    assert (row["key_alias"], row["team"], row["input_tokens"], row["output_tokens"]) == ("app", "red", 10, 4)
    assert "app" in tokenline("keys", "usage", "--by", "model")[1]


def test_keys_that_do_not_exist_or_exist_already_are_told_apart(tokenline):
    tokenline("keys", "create", "--alias", "a")
    assert tokenline("keys", "create", "--alias", "a")[0] == Exit.FAILURE
    code, _, err = tokenline("keys", "revoke", "nobody")
    assert (code, "nobody" in err) == (Exit.NOT_FOUND, True)


def test_a_key_is_set_option_by_option(tokenline, tmp_path):
    (tmp_path / "tokenline.toml").write_text("[plans.free]\nrequests_per_minute = 60\n")
    made = json.loads(tokenline("keys", "create", "--alias", "app", "--rpm", "5", "--models", "a,b", "--json")[1])
    code, out, _ = tokenline("keys", "set", "app", "--plan", "free", "--daily", "8", "--expires", "1h", "--json")
    changed = json.loads(out)
    assert (code, changed["id"], changed["plan"], changed["models"]) == (0, made["id"], "free", ["a", "b"])
    assert changed["limits"] == {"requests_per_minute": 5, "tokens_per_day": 8}
    assert changed["expires_ns"] > made["created_ns"]
    code, out, _ = tokenline(
        "keys", "set", made["id"], "--alias", "new", "--plan", "none", "--rpm", "none", "--models", "none",
        "--expires", "none", "--team", "red", "--tags", "web, eu",
    )  # fmt: skip
    assert (code, out) == (0, f"{made['id']} new: team red, plan -, models all, own limits 8 tokens/day\n")
    shown = json.loads(tokenline("keys", "show", "new", "--json")[1])
    assert (shown["expires_ns"], shown["tags"]) == (None, ["web", "eu"])


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ([], Exit.USAGE, "--rpm 120"),
        (["--rpm", "0"], Exit.USAGE, "--rpm '0'"),
        (["--tpm", "many"], Exit.USAGE, "--tpm 'many'"),
        (["--models", ","], Exit.USAGE, "--models"),
        (["--expires", "soon"], Exit.USAGE, "--expires"),
        (["--plan", "gone"], Exit.FAILURE, "leave the plan out"),
        (["--alias", "taken"], Exit.FAILURE, "taken"),
    ],
)
def test_what_a_key_cannot_be_set_to_is_told(tokenline, options, code, words):
    tokenline("keys", "create", "--alias", "app")
    tokenline("keys", "create", "--alias", "taken")
    found, out, err = tokenline("keys", "set", "app", *options)
    assert (found, out) == (code, "")
    assert words in err


def test_a_key_that_does_not_exist_is_not_set(tokenline):
    assert tokenline("keys", "set", "nobody", "--rpm", "5")[0] == Exit.NOT_FOUND
