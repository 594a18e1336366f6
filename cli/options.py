"""Options that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Config = Annotated[
    Path | None,
    typer.Option("--config", metavar="FILE", help="Configuration file. [default: TOKENLINE_CONFIG, ./tokenline.toml]"),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of text for people.")]
Lang = Annotated[
    Literal["en", "zh"] | None,
    typer.Option("--lang", metavar="en|zh", help="Language. [default: Chinese where LC_ALL or LANG is, else English]"),
]
OpsUrl = Annotated[
    str | None,
    typer.Option(
        "--ops-url",
        envvar="TOKENLINE_OPS_URL",
        metavar="URL",
        show_envvar=False,
        help="Ops listener of a running gateway. [default: TOKENLINE_OPS_URL, else as configured]",
    ),
]
Model = Annotated[
    str | None, typer.Option("--model", metavar="M", help="Model: a folder, a GGUF file, a hub id, or smollm2.")
]
Device = Annotated[
    str | None, typer.Option("--device", metavar="D", help="auto, cpu, cuda or simulated (known times, no model).")
]
Backend = Annotated[
    str | None,
    typer.Option("--backend", metavar="B", help="tokenline (our engine) or vllm. [default: engine.backend]"),
]
