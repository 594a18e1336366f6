"""The example's load test as it stands, and one of the demo model: `python -m benchmarks.example_runs`.

`settings` runs docs/examples/settings.json (330 s) against `tokenline up --device simulated` with 128 slots, on the
ports that the file takes for granted (8080, 9464, 4318); `model` keeps 4 in flight at the demo model, prompts of 64
tokens, answers of up to 16.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from benchmarks.compared_runs import TOKENLINE, line
from benchmarks.gateway import ROOT, free_port

SETTINGS = ROOT / "docs" / "examples" / "settings.json"
MODEL_LOAD = ("--concurrency", "4", "--prompt-tokens", "64", "--max-output-tokens", "16", "--warmup", "5s")


def run(name: str) -> dict[str, Any]:
    """One of the two; gives what `bench run --json` printed."""
    with tempfile.TemporaryDirectory(prefix="bench-example-") as folder:
        environ = {k: v for k, v in os.environ.items() if not k.startswith("TOKENLINE_")}
        environ |= {"TOKENLINE_STATE_DIR": folder}
        if name == "settings":
            environ |= {"TOKENLINE_SCHEDULER__MAX_NUM_SEQS": "128"}
            up, load = ("--device", "simulated"), ("--settings", str(SETTINGS))
        else:
            ports = {part: str(free_port()) for part in ("PORT", "OPS_PORT", "OTLP_PORT")}
            environ |= {f"TOKENLINE_SERVER__{part}": port for part, port in ports.items()}
            up, load = (), (*MODEL_LOAD, "--duration", "40s")
        with line(environ, *up) as facts:
            client = environ | {"TOKENLINE_API_KEY": facts["key"], "TOKENLINE_OPS_URL": facts["ops_url"]}
            address = () if name == "settings" else ("--base-url", facts["base_url"])
            command = [TOKENLINE, "bench", "run", *load, *address, "--json"]
            done = subprocess.run(command, env=client, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout:
        raise SystemExit(done.returncode)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    """Runs and prints; exit status 1 where a request failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="?", choices=["settings", "model"], help="one of the two only")
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    args = parser.parse_args()
    found = {name: run(name) for name in ([args.which] if args.which else ("model", "settings"))}
    load_average = [round(value, 1) for value in os.getloadavg()]
    if args.json:
        print(json.dumps({**found, "load_average": load_average}, indent=1))
    else:
        for name, told in found.items():
            (stage,) = told["stages"]
            times = (
                f"{key[:-3].upper()} P50 {stage[key]['p50']:.4g}, P99 {stage[key]['p99']:.4g} ms" for key in _TIMES
            )
            failed = f"{stage['errors']} of {stage['requests']} failed"
            print(
                f"{name}: {stage['tps']:.1f} tokens/s, {failed}, {'; '.join(times)}; tokens by {told['token_counts']}"
            )
        print(f"load average {load_average}")
    sys.exit(any(stage["errors"] for told in found.values() for stage in told["stages"]))


_TIMES = ("ttft_ms", "tpot_ms", "e2e_ms")


if __name__ == "__main__":
    main()
