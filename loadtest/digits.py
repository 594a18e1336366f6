"""Figures as people read them."""

from __future__ import annotations

WHOLE_FROM = 1000
"""From here on four digits are a whole number, and Python's own four-digit form would turn to powers of ten."""


def four_digits(value: float, sign: str = "") -> str:
    """A figure to four digits, never as a power of ten; `sign="+"` shows a plus."""
    return f"{value:{sign}.0f}" if abs(value) >= WHOLE_FROM else f"{value:{sign}.4g}"
