"""Reloading: what of new settings is taken, how processes are told, and what whoever asked hears of it."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from cli import signals
from cli.reload import CONFIRM_SECONDS, Reloader
from settings.errors import SettingsError
from settings.feed import Feed, Message
from settings.reloading import change_of
from settings.schema import Settings
from settings.transfer import pack_settings, unpack_settings
from tracing.observer.reloads import Reloads


def settings(**sections: Any) -> Settings:
    upstreams = [{"name": "a", "url": "http://a/v1"}, {"name": "b", "url": "http://b/v1"}]
    models = [{"name": "m", "targets": [{"upstream": "a"}]}]
    base = {"state_dir": Path("/state"), "engine": {"backend": "none"}, "upstreams": upstreams, "models": models}
    return Settings.model_validate({**base, **sections})


def test_entries_are_added_removed_and_changed_by_name() -> None:
    new = settings(
        upstreams=[{"name": "b", "url": "http://b/v1", "health_path": ""}, {"name": "c", "url": "http://c/v1"}],
        models=[{"name": "n", "targets": [{"upstream": "b"}]}],
        plans={"free": {"requests_per_minute": 5}},
        keys={"default_plan": "free"},
        server={"queue_size": 7, "api_key": "new"},
        slo={"default": {"ttft_ms": 50}},
    )
    change = change_of(settings(), new)
    assert change.added == ("upstreams.c", "models.n", "plans.free")
    assert change.removed == ("upstreams.a", "models.m")
    assert change.changed == ("upstreams.b", "slo.default", "server.api_key", "server.queue_size", "keys.default_plan")
    assert (change.needs_restart, change.settings) == ((), new)


def test_what_cannot_change_while_processes_run_is_named_and_left_as_it_is() -> None:
    new = settings(
        server={"port": 9999, "workers": 4, "queue_size": 3}, tracing={"sample_ratio": 0.5}, keys={"flush_seconds": 9}
    )
    change = change_of(settings(), new)
    assert change.needs_restart == ("server.port", "server.workers", "tracing.sample_ratio", "keys.flush_seconds")
    assert change.changed == ("server.queue_size",)
    assert (change.settings.server.port, change.settings.server.queue_size) == (8080, 3)


def test_the_same_settings_are_no_change() -> None:
    assert not change_of(settings(), settings()).is_any


def test_a_mixture_that_makes_no_sense_is_refused() -> None:
    # The engine that runs would share its name with an upstream, until a restart has ended it.
    with pytest.raises(SettingsError, match="'engine'"):
        change_of(
            settings(engine={"backend": "tokenline"}),
            settings(upstreams=[{"name": "engine", "url": "http://e/v1"}], models=[]),
        )


def test_a_file_that_is_just_being_written_leaves_no_gateway_without_models() -> None:
    # An empty file is a configuration, with an engine; the gateway that runs has none.
    with pytest.raises(SettingsError, match="nothing to answer"):
        change_of(settings(), Settings(state_dir=Path("/state")))


class Child:
    """A process that remembers what it was told and says what the test has it say."""

    def __init__(self) -> None:
        self.told: list[Message] = []
        self.says: list[Message] = []

    def send(self, message: Message) -> None:
        self.told.append(message)

    def messages(self) -> list[Message]:
        said, self.says = self.says, []
        return said

    def confirms(self, **more: str) -> None:
        self.says.append({"applied": self.told[-1]["number"], **more})


class Bench:
    """A reloader of two workers and an observer; `new` is what the file says."""

    def __init__(self) -> None:
        self.now = 0.0
        self.said: list[str] = []
        self.new: Settings | Exception = settings()
        self.children = {name: Child() for name in ("worker", "worker 1", "observer")}
        self.reloader = Reloader(
            settings(), self.load, lambda: self.children, say=self.said.append, clock=lambda: self.now
        )

    def load(self) -> Settings:
        if isinstance(self.new, Exception):
            raise self.new
        return self.new

    def result(self) -> Message:
        self.reloader.tick()
        found: Message = self.children["observer"].told[-1]["reloaded"]
        return found


def test_every_process_is_told_and_the_answer_comes_when_all_have_confirmed() -> None:
    bench = Bench()
    bench.new = settings(plans={"free": {}})
    bench.children["observer"].says = [{"reload": 7}]
    bench.reloader.tick()
    for name, child in bench.children.items():
        assert unpack_settings(child.told[0]["settings"].encode()) == bench.new, name
        bench.reloader.tick()
        assert "reloaded" not in bench.children["observer"].told[-1]
        child.confirms()
    result = bench.result()
    assert (result["result"], result["asked"], result["added"], result["late"]) == ("ok", [7], ("plans.free",), [])
    assert bench.said == ["configuration reloaded: added plans.free"]
    assert bench.reloader.line == pack_settings(bench.new)  # what starts now starts with it


def test_a_configuration_that_cannot_be_used_changes_nothing_and_is_told() -> None:
    bench, line = Bench(), Bench().reloader.line
    bench.new = SettingsError("server.prot is not a setting; did you mean server.port?")
    bench.children["observer"].says = [{"reload": 1}]
    result = bench.result()
    assert (result["result"], result["error"], result["asked"]) == ("failed", str(bench.new), [1])
    assert "did you mean" in bench.said[0]
    assert "stays so" in bench.said[0]
    assert (bench.reloader.line, bench.children["worker"].told) == (line, [])
    bench.new = RuntimeError("of another kind")
    bench.reloader.ask()
    assert bench.result()["error"] == "RuntimeError: of another kind"


def test_who_does_not_confirm_is_named_and_who_ended_meanwhile_is_not_waited_for() -> None:
    bench = Bench()
    bench.new = settings(plans={"free": {}}, server={"port": 1234})
    bench.reloader.ask()
    bench.reloader.tick()
    bench.children["observer"].confirms()
    del bench.children["worker 1"]
    bench.now += CONFIRM_SECONDS - 0.1
    bench.reloader.tick()
    assert not bench.said
    bench.now += 0.1
    assert bench.result()["late"] == ["worker"]
    assert bench.said[0].endswith("needs a restart: server.port")
    assert "worker" in bench.said[1]


def test_a_process_that_could_not_take_it_makes_the_reload_a_failed_one() -> None:
    bench = Bench()
    bench.new = settings(plans={"free": {}})
    bench.reloader.ask()
    bench.reloader.tick()
    bench.children["observer"].confirms()
    bench.children["worker"].confirms(failed="KeyError: 'x'")
    bench.children["worker 1"].confirms()
    result = bench.result()
    assert (result["result"], result["error"]) == ("failed", "worker: KeyError: 'x'")


def test_a_second_wish_during_a_reload_reads_the_file_once_more() -> None:
    bench = Bench()
    bench.new = settings(plans={"free": {}})
    bench.reloader.ask()
    bench.reloader.tick()
    bench.new = settings(plans={"free": {}, "team": {}})
    bench.children["observer"].says = [{"reload": 2}]
    bench.reloader.tick()
    for child in bench.children.values():
        child.confirms()
    assert bench.result()["asked"] == []
    bench.reloader.tick()
    for child in bench.children.values():
        if "number" in child.told[-1]:
            child.confirms()
    result = bench.result()
    assert (result["asked"], result["added"]) == ([2], ("plans.team",))


async def test_what_a_process_is_told_before_it_listens_is_not_lost() -> None:
    answers: list[Message] = []
    feed, others, seen = Feed(settings(), answers.append), [], []
    new = settings(plans={"free": {}})
    feed.put({"number": 1, "settings": pack_settings(new).decode()})
    feed.listen(seen.append, others.append)
    feed.put({"reloaded": {}})
    await asyncio.sleep(0)
    assert (seen, others, answers) == ([new], [{"reloaded": {}}], [{"applied": 1}])
    assert feed.settings == new


async def test_settings_that_a_process_fails_to_take_are_told_and_not_in_force() -> None:
    answers: list[Message] = []
    feed, old = Feed(settings(), answers.append), settings()

    def fail(_: Settings) -> None:
        raise KeyError("x")

    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # it is in the log, too
    feed.listen(fail)
    feed.put({"number": 3, "settings": pack_settings(settings(plans={"free": {}})).decode()})
    await asyncio.sleep(0)
    assert answers == [{"applied": 3, "failed": "KeyError: 'x'"}]
    assert feed.settings == old


async def test_the_observer_answers_those_who_asked_and_counts_every_reload() -> None:
    asked: list[Message] = []
    counted: list[bool] = []
    reloads = Reloads(asked.append, counted.append)
    first, second = asyncio.create_task(reloads.reload()), asyncio.create_task(reloads.reload())
    await asyncio.sleep(0)
    reloads.told({"reloaded": {"result": "failed", "error": "no", "asked": [asked[1]["reload"]]}})
    assert (await second).error == "no"
    assert not first.done()
    reloads.told({"reloaded": {"result": "ok", "asked": []}})  # by a signal
    reloads.told({"reloaded": {"result": "ok", "asked": [asked[0]["reload"]], "changed": ["models.m"]}})
    assert (await first).changed == ("models.m",)
    assert counted == [False, True, True]


@pytest.mark.parametrize(
    ("terminal", "reloads"), [([False, False], True), ([True, True], True), ([True, False], False)]
)
def test_sighup_asks_for_a_reload_unless_the_terminal_was_closed(monkeypatch, terminal, reloads) -> None:
    answers = iter(terminal)
    monkeypatch.setattr(signals, "has_terminal", lambda: next(answers))
    former = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # who runs the tests under nohup ignores it
    try:
        with signals.ending_signals() as asked:
            os.kill(os.getpid(), signal.SIGHUP)
            assert (asked.to_reload, asked.to_end) == (reloads, not reloads)
    finally:
        signal.signal(signal.SIGHUP, former)
