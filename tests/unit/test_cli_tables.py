"""Tables of text: whole for pipes, folded between words on narrow terminals; figures without powers of ten."""

from __future__ import annotations

import pytest

from cli.tables import print_table
from loadtest.digits import four_digits

COLUMNS = ("id", "alias", "team", "models", "plan", "limits", "state")
ROW = (
    "key_40e757937d708e7c", "batch", "-", "all", "-",
    "600 requests/min, 200000 tokens/min, 8 at once, 5000000 tokens/day", "works until 2027-02-28 20:29",
)  # fmt: skip


def test_a_row_for_a_pipe_is_one_line_however_long(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(COLUMNS, [ROW])
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == list(COLUMNS)
    assert all(cell in row for cell in ROW)


def test_a_narrow_table_breaks_between_words(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    print_table(COLUMNS, [ROW])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) > 2
    assert max(map(len, lines)) <= 80
    words = [word for line in lines[1:] for word in line.split()]
    assert sorted(words) == sorted(word for cell in ROW for word in cell.split())


@pytest.mark.parametrize(
    ("value", "sign", "shown"),
    [
        (20078.9, "", "20079"), (-19720.4, "+", "-19720"), (12390.0, "+", "+12390"), (47.143, "+", "+47.14"),
        (0.1136, "", "0.1136"),
    ],
)  # fmt: skip
def test_no_figure_is_a_power_of_ten(value: float, sign: str, shown: str) -> None:
    assert four_digits(value, sign) == shown
