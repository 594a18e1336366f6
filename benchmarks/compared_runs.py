"""Three load tests of the simulated engine and what `bench compare` says of them: `python -m benchmarks.compared_runs`.

Two of the same engine ("no difference"), a third with async_scheduling off (the difference, its interval, the stage).
All go through `tokenline up` at the same base_url with the same key, as a user would compare before and after.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.gateway import free_port

TOKENLINE = str(Path(sys.executable).with_name("tokenline"))
IN_FLIGHT, SLOTS, FORWARD_MS = 64, 32, 35
OFF = {
    "TOKENLINE_TOKEN_INTERVAL__ASYNC_SCHEDULING": "false",
    "TOKENLINE_TOKEN_INTERVAL__OVERLAP_TOKEN_INTERVAL": "false",
}
RUNS: dict[str, dict[str, str]] = {"on": {}, "on again": {}, "off": OFF}


@contextmanager
def line(environ: dict[str, str], *arguments: str) -> Iterator[dict[str, Any]]:
    """A whole `tokenline up`; gives what it prints."""
    command = [TOKENLINE, "up", "--json", *arguments]
    process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    try:
        first = process.stdout.readline()
        if not first:
            raise SystemExit("tokenline up did not come up")
        yield json.loads(first)
    finally:
        process.terminate()
        process.wait(30)


def measure(seconds: int, folder: str) -> dict[str, Any]:
    """The runs, one after another, and both comparisons."""
    ports = {name: str(free_port()) for name in ("PORT", "OPS_PORT", "OTLP_PORT")}
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TOKENLINE_")} | {
        "TOKENLINE_STATE_DIR": folder,
        "TOKENLINE_SIMULATED__FORWARD_MS": str(FORWARD_MS),
        "TOKENLINE_SCHEDULER__MAX_NUM_SEQS": str(SLOTS),
        **{f"TOKENLINE_SERVER__{name}": port for name, port in ports.items()},
    }
    load = ["--stages", f"{IN_FLIGHT}:{seconds}s", "--prompt-tokens", "64", "--max-output-tokens", "64", "--ignore-eos"]
    names = {}
    with Progress(console=Console(stderr=True), transient=True) as progress:
        for name, extra in progress.track(RUNS.items(), description="measuring"):
            with line(environ | extra, "--device", "simulated") as facts:
                client = environ | {"TOKENLINE_API_KEY": facts["key"], "TOKENLINE_OPS_URL": facts["ops_url"]}
                command = [TOKENLINE, "bench", "run", "--base-url", facts["base_url"], *load, "--json"]
                done = subprocess.run(command, env=client, capture_output=True, text=True, check=True)
                names[name] = json.loads(done.stdout)["run"]
    result: dict[str, Any] = {"runs": names, "load_average": [round(value, 1) for value in os.getloadavg()]}
    for title, other in (("equal", "on again"), ("async_scheduling off", "off")):
        command = [TOKENLINE, "bench", "compare", names["on"], names[other]]
        environ |= {"COLUMNS": "100"}
        result[title] = {
            "text": subprocess.run(command, env=environ, capture_output=True, text=True, check=True).stdout,
            **json.loads(subprocess.run([*command, "--json"], env=environ, capture_output=True, check=True).stdout),
        }
    return result


def main() -> None:
    """Measures and prints; exit status 1 where equal runs differ, or the stage of the difference is not found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    parser.add_argument("--seconds", type=int, default=30, help="length of each run")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-compared-") as folder:
        result = measure(args.seconds, folder)
    equal, off = result["equal"], result["async_scheduling off"]
    moved = {found["metric"] for found in off["moved"].values()}
    result["holds"] = {
        "equal runs: no difference": not [one for one in equal["differences"] if one["verdict"] in _DIFFERENT],
        "off: decode takes longer": moved == {"engine_decode_p50"},
    }
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        print(f"$ tokenline bench compare A B        # equal\n{equal['text']}")
        print(f"$ tokenline bench compare A C        # async_scheduling off\n{off['text']}")
        print(f"holds: {result['holds']}; load average {result['load_average']}")
    sys.exit(not all(result["holds"].values()))


_DIFFERENT = ("better", "worse", "longer", "shorter")


if __name__ == "__main__":
    main()
