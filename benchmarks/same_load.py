"""The same load by AIPerf and by Tokenline, in turn: `python -m benchmarks.same_load --aiperf PATH/TO/aiperf`.

AIPerf (pip install aiperf) has an environment of its own. Both keep so many requests in flight at the simulated engine,
with prompts of one length of which no two begin alike, answers of 16 tokens, and usage as the count of tokens. One in
flight with long prefills, or 4 with short ones: where 4 long prefills meet, TTFT depends on how the answers of a closed
loop happen to lie in time, and differs from run to run of the same tool.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress

from benchmarks.gateway import free_port, running

OUTPUT_TOKENS, FORWARD_MS = 16, 50
LOADS = ((1, 2000), (4, 20))
"""Requests in flight, and µs of prefill for a token: TTFT of some 510 ms alone, of some 110 ms with others."""
PROMPT = "Tell me something about the sea, the sky and the land between them. " * 3
LIMIT = 0.05
METRICS = ("ttft_ms", "tpot_ms", "e2e_ms")


class Load(NamedTuple):
    """What both tools do."""

    port: int
    in_flight: int
    seconds: int


def prompts(file: Path, first: int) -> Path:
    """Prompts that no cache of prefixes has: they begin with numbers from `first` on."""
    file.write_text("".join(json.dumps({"text": f"{first + n} {PROMPT}"}) + "\n" for n in range(1000)))
    return file


def by_aiperf(tool: tuple[str, str], load: Load, file: Path, folder: Path) -> dict[str, Any]:
    """P50s in ms by AIPerf; its inter token latency is (end of the request - first token) / (tokens - 1)."""
    binary, tokenizer = tool
    if os.path.isdir(tokenizer):
        # It takes a path with slashes for a repository's name.
        link = folder / "tokenizer"
        link.unlink(missing_ok=True)
        link.symlink_to(Path(tokenizer).resolve())
        tokenizer = link.name
    command = [binary, "profile", "--model", "simulated", "--endpoint-type", "chat", "--streaming", "--ui", "none"]
    command += [
        "--url",
        f"http://127.0.0.1:{load.port}",
        "--concurrency",
        str(load.in_flight),
        "--tokenizer",
        tokenizer,
    ]
    command += ["--benchmark-duration", str(load.seconds), "--input-file", str(file), "--use-server-token-count"]
    command += ["--custom-dataset-type", "single_turn", "--extra-inputs", f"max_tokens:{OUTPUT_TOKENS}"]
    command += ["--extra-inputs", "ignore_eos:true", "--artifact-dir", str(folder / file.stem)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
    found = next((folder / file.stem).rglob("profile_export_aiperf.json"), None)
    if found is None:
        raise SystemExit(f"aiperf gave no figures:\n{done.stdout[-1500:]}{done.stderr[-1500:]}")
    told = json.loads(found.read_text())
    names = {"ttft_ms": "time_to_first_token", "tpot_ms": "inter_token_latency", "e2e_ms": "request_latency"}
    return {name: told[other]["p50"] for name, other in names.items()} | {"requests": told["request_count"]["avg"]}


def by_tokenline(load: Load, file: Path, folder: Path) -> dict[str, Any]:
    """The same by `tokenline bench run`."""
    command = [str(Path(sys.executable).with_name("tokenline")), "bench", "run", "--json", "--no-key", "--ignore-eos"]
    command += ["--base-url", f"http://127.0.0.1:{load.port}/v1", "--concurrency", str(load.in_flight), "--duration"]
    command += [f"{load.seconds}s", "--prompts", str(file), "--max-output-tokens", str(OUTPUT_TOKENS)]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TOKENLINE_")}
    environ["TOKENLINE_STATE_DIR"] = str(folder / "state")
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=True)
    (stage,) = json.loads(done.stdout)["stages"]
    return {name: stage[name]["p50"] for name in METRICS} | {"requests": stage["e2e_ms"]["count"]}


def measure(aiperf: tuple[str, str], seconds: int, rounds: int) -> dict[str, Any]:
    """Both tools in turn under each load, and how far apart the medians of their P50s are."""
    found = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("measuring", total=rounds * len(LOADS))
        for in_flight, prefill_us in LOADS:
            with tempfile.TemporaryDirectory(prefix="bench-same-") as folder, engine(Path(folder), prefill_us) as port:
                load = Load(port, in_flight, seconds)
                taken: dict[str, list[dict[str, Any]]] = {"aiperf": [], "tokenline": []}
                for number in range(rounds):
                    file = prompts(Path(folder) / f"a{number}.jsonl", 100_000 + 20_000 * number)
                    taken["aiperf"].append(by_aiperf(aiperf, load, file, Path(folder)))
                    file = prompts(Path(folder) / f"t{number}.jsonl", 110_000 + 20_000 * number)
                    taken["tokenline"].append(by_tokenline(load, file, Path(folder)))
                    progress.advance(task)
            found.append(compared(in_flight, prefill_us, taken))
    return {"loads": found, "load_average": [round(value, 1) for value in os.getloadavg()]}


@contextmanager
def engine(folder: Path, prefill_us: int) -> Iterator[int]:
    """The simulated engine; gives its port."""
    port = free_port()
    environ = {k: v for k, v in os.environ.items() if not k.startswith("TOKENLINE_")} | {
        "TOKENLINE_STATE_DIR": str(folder / "engine"),
        "TOKENLINE_SERVER__PORT": str(port),
        "TOKENLINE_SIMULATED__FORWARD_MS": str(FORWARD_MS),
        "TOKENLINE_SIMULATED__PREFILL_TOKEN_US": str(prefill_us),
    }
    command = [str(Path(sys.executable).with_name("tokenline")), "engine", "--device", "simulated"]
    with running(command, None, port, env=environ):
        yield port


def compared(in_flight: int, prefill_us: int, taken: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """One load: the medians of the P50s, and Tokenline's against AIPerf's."""
    p50 = {
        tool: {name: statistics.median(one[name] for one in runs) for name in METRICS} for tool, runs in taken.items()
    }
    off = {name: round(p50["tokenline"][name] / p50["aiperf"][name] - 1, 4) for name in METRICS}
    holds = all(abs(off[name]) <= LIMIT for name in ("ttft_ms", "tpot_ms"))
    return {"in_flight": in_flight, "prefill_us": prefill_us, "p50": p50, "off": off, "holds": holds, "runs": taken}


def main() -> None:
    """Measures and prints; exit status 1 where the two differ by more than the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON on standard output")
    parser.add_argument("--aiperf", required=True, help="where the aiperf command is")
    parser.add_argument(
        "--tokenizer",
        default="builtin",
        help="what AIPerf wants for its start (builtin is fetched); usage is what it counts by",
    )
    parser.add_argument("--seconds", type=int, default=15, help="length of each run")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each tool")
    args = parser.parse_args()
    result = measure((args.aiperf, args.tokenizer), args.seconds, args.rounds)
    if args.json:
        print(json.dumps(result, indent=1))
    else:
        for load in result["loads"]:
            for name in METRICS:
                both = " / ".join(f"{load['p50'][tool][name]:.2f}" for tool in ("aiperf", "tokenline"))
                print(f"{load['in_flight']} in flight, {name} P50: {both} ({load['off'][name]:+.1%})")
        print(f"AIPerf / Tokenline; load average {result['load_average']}")
    sys.exit(not all(load["holds"] for load in result["loads"]))


if __name__ == "__main__":
    main()
