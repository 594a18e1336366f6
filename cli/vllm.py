"""vLLM as the engine: whether it can be started with these settings, and the command line that they become."""

from __future__ import annotations

import os
import shlex

from backend_engine.backends.vllm_command import VllmCommand, check_listener, find_vllm
from backend_engine.backends.vllm_flags import check_vllm, inherited_by_vllm, notes_on, plan_of
from backend_engine.backends.vllm_process import shell_line, shown_environment
from cli.errors import CliError, Exit
from cli.output import print_json, say_notes
from settings.errors import SettingsError
from settings.loader import Loaded
from tracing.clock import host_identity

NOT_INSTALLED = VllmCommand(("vllm",), None)


def check_vllm_startable(loaded: Loaded) -> list[str]:
    """Notes on what was set in vain. Raises SettingsError when vLLM is not here or can't do what is asked."""
    check_vllm(loaded.settings)
    command = find_vllm(loaded.settings.engine)
    check_listener(loaded.settings.engine, command)
    return notes_on(loaded.settings, loaded.origins)


def show_command(loaded: Loaded, *, as_json: bool) -> None:
    """Prints what `tokenline engine` would start. vLLM need not be installed for that."""
    settings = loaded.settings
    if settings.engine.backend != "vllm":
        raise CliError("--dry-run prints the command line of vLLM; give --backend vllm with it", Exit.USAGE)
    notes = [*loaded.notes, *notes_on(settings, loaded.origins)]
    try:
        command, is_installed = find_vllm(settings.engine), True
    except SettingsError as error:
        command, is_installed = NOT_INSTALLED, False
        notes.append(f"nothing could be started here: {error}")
    plan = plan_of(settings, None, host=host_identity(), inherited=inherited_by_vllm(os.environ), is_alone=True)
    words = (*command.words, "serve", *plan.arguments)
    if as_json:
        print_json(
            {
                "command": list(words),
                "shell": shlex.join(words),
                "environment": dict(shown_environment(plan)),
                "installed": is_installed,
                "version": ".".join(map(str, command.version)) if command.version else None,
                "notes": notes,
            }
        )
        return
    print(shell_line(words, plan))
    say_notes(notes)
