"""Nothing that others wrote moves a terminal's cursor, sets its title or hides a line."""

import io

import pytest

from cli.output import console, echo, say
from cli.plain import plain
from cli.tables import print_table

HOSTILE = "\x1b]0;title\x07\x1b[2J\x9b1A\rover\u202ednah"
OBEYED = ("\x1b", "\x07", "\x9b", "\r", "\u202e")


def test_lines_tabs_and_colours_stay() -> None:
    assert plain("a\tb\n\x1b[1;31mred\x1b[0m é 你") == "a\tb\n\x1b[1;31mred\x1b[0m é 你"


def test_what_others_wrote_is_printed_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(("alias", "team"), [("app", HOSTILE)])
    console().print(HOSTILE)
    echo(HOSTILE)
    say(HOSTILE)
    out, error = capsys.readouterr()
    assert [sign for sign in OBEYED if sign in out + error] == []
    assert out.count("title") == 3
    assert "over?dnah" in error


def test_colours_of_our_own_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    console().print("x" + HOSTILE, style="bold red")
    assert "\x1b[1;31m" in terminal.getvalue()
    assert "\x1b[2J" not in terminal.getvalue()
