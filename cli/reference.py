"""docs/configuration.md, made from the schema: `tokenline config schema --markdown > docs/configuration.md`."""

from __future__ import annotations

from itertools import groupby

from settings.catalogue import INDEX, NAME, SPELLINGS, Key, catalogue

_INTRODUCTION = """\
# Configuration

<!-- Made from settings/schema.py by `tokenline config schema --markdown`; a test keeps it current. -->

One TOML file: the one of `--config`, else of `TOKENLINE_CONFIG`, else `./tokenline.toml`, else built-in defaults.
`tokenline config show` prints what is in effect and where each value came from; `tokenline config reload` has a running
gateway take a changed one ([reload.md](reload.md)).

- **Environment.** Every key can be overridden: `TOKENLINE_SCHEDULER__MAX_NUM_SEQS=64`. Numbers, `true` and `false` are
  read as in TOML. An empty variable counts as not set. Entries of lists are counted from 0
  (`TOKENLINE_UPSTREAMS__0__URL`), names of `[slo]` tables are lower case. An unknown name is an error.
- **Command line.** `--model`, `--device`, `--backend` win over both.
- **References.** `${NAME}` in a string of the file is replaced by that environment variable; one that is not set is an
  error. `$${` stands for `${` itself.
- **Secrets** belong in the environment: `api_key = "${TOKENLINE_API_KEY}"`, `api_key_env = "OPENAI_API_KEY"`; or in
  files: for `server.api_key`, `server.admin_key`, `server.otlp_token` and `redis.url`, the variable with `_FILE` behind
  its name (`TOKENLINE_SERVER__ADMIN_KEY_FILE=/run/secrets/admin-key`) names a file whose text is the value.
- **State.** Keys, traces and sockets live in one folder for each instance: `TOKENLINE_STATE_DIR`, else the platform's
  folder for application state. A second instance on one machine needs a folder and ports of its own.
- **Loading is not running.** A file may name a model or a number of GPUs that isn't here; starting says so.

`[[upstreams]]` without any `[engine]` key means that no engine is started (`engine.backend = "none"`).

Variables with a meaning of their own: `TOKENLINE_CONFIG`, `TOKENLINE_STATE_DIR`, `TOKENLINE_CACHE_DIR` (converted
models), `TOKENLINE_API_KEY` (by convention, see `server.api_key`), `TOKENLINE_ADMIN_KEY` and `TOKENLINE_OPS_URL` (for
verbs that ask a running gateway).
"""


def configuration_page() -> str:
    """The whole page."""
    parts = [_INTRODUCTION, *(_section(table, list(keys)) for table, keys in groupby(catalogue(), _table_of))]
    parts.append("## Other spellings\n\n| written | means |\n|---|---|\n")
    parts[-1] += "".join(f"| `{'.'.join(other)}` | `{'.'.join(kept)}` |\n" for other, kept in SPELLINGS.items())
    parts[-1] += "\nGiving both with different values is an error.\n"
    return "\n".join(parts)


def _table_of(key: Key) -> str:
    """The table's header as it is written in a file."""
    names = [part for part in key.path[:-1] if part not in (INDEX, NAME)]
    if INDEX in key.path:
        return f"[[{'.'.join(names)}]]"
    return f"[{'.'.join(names)}.NAME]" if NAME in key.path else f"[{'.'.join(names)}]"


def _section(table: str, keys: list[Key]) -> str:
    rows = "".join(
        f"| `{key.path[-1]}` | {_cell(key.allowed)} | {_cell(f'`{key.default}`')} | {_cell(key.meaning)} |\n"
        for key in keys
    )
    return f"## `{table}`\n\n| key | value | default | meaning |\n|---|---|---|---|\n{rows}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
