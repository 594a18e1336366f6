"""`tokenline plans`: the named sets of limits that keys may have."""

from __future__ import annotations

import typer

from cli.errors import EXIT_CODES
from cli.key_access import keys_of
from cli.options import Config, Json, OpsUrl

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Shows the plans that keys may have.")


@app.callback()
def plans() -> None:
    """Shows the plans that keys may have. They are tables [plans.NAME] of the configuration."""


@app.command(
    name="list",
    epilog=f"""
Examples:

\b
  tokenline plans list
  tokenline plans list --json | jq '.plans[] | select(.name == "free") | .limits'

{EXIT_CODES}
""",
)
def list_plans(ops_url: OpsUrl = None, config: Config = None, as_json: Json = False) -> None:
    """Lists every plan with what it limits."""
    from cli.keys import limits_in_words
    from cli.output import print_json, say
    from cli.tables import print_table

    found = keys_of(ops_url, config).plans()
    if as_json:
        print_json(found)
        return
    if not found["plans"]:
        say("there is no plan; add a table [plans.NAME] to the configuration, such as requests_per_minute = 60")
        return
    print_table(
        ("plan", "limits", "default"),
        (
            (plan["name"], limits_in_words(plan["limits"]), "yes" if plan["name"] == found["default_plan"] else "")
            for plan in found["plans"]
        ),
    )
