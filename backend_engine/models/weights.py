"""Whether a model folder is whole, told from file headers alone, before anything heavy is loaded.

safetensors: 8 bytes of header length (little endian), a JSON header whose data_offsets end at the file's last byte.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from backend_engine.models.errors import ModelError

_MOST_HEADER_BYTES = 100_000_000


def check_folder(name: str, folder: Path) -> None:
    """Raises when `folder` is no complete model in the layout of the Hugging Face hub with safetensors weights."""
    config = folder / "config.json"
    if not config.is_file():
        raise ModelError(
            f"model {name!r}: the folder {folder} has no config.json, so it is no Hugging Face model folder; "
            "point engine.model at the folder that holds config.json and *.safetensors, or at a .gguf file"
        )
    _read_json(name, config)
    for file in _weight_files(name, folder):
        _check_safetensors(name, file)


def count_weights(name: str, folder: Path) -> int:
    """How many numbers the weights are, by the files' headers. Raises ModelError."""
    shapes = [
        entry["shape"]
        for file in _weight_files(name, folder)
        for key, entry in _check_safetensors(name, file).items()
        if key != "__metadata__"
    ]
    return sum(math.prod(shape) for shape in shapes)


def _weight_files(name: str, folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        shards = sorted(set(_read_json(name, index).get("weight_map", {}).values()))
        missing = [shard for shard in shards if not (folder / shard).is_file()]
        if missing or not shards:
            raise ModelError(
                f"model {name!r}: {index.name} names {len(shards)} files and {missing[0] if missing else 'none'} is "
                f"missing in {folder}; download the model again"
            )
        return [folder / shard for shard in shards]
    single = folder / "model.safetensors"
    if not single.is_file():
        raise ModelError(
            f"model {name!r}: {folder} has no model.safetensors and no model.safetensors.index.json; "
            "weights in other formats are not loaded: convert them to safetensors"
        )
    return [single]


def _check_safetensors(name: str, file: Path) -> dict[str, Any]:
    """The header of a whole file."""
    size = file.stat().st_size
    try:
        with file.open("rb") as opened:
            header_bytes = struct.unpack("<Q", opened.read(8))[0]
            if header_bytes > min(size, _MOST_HEADER_BYTES):
                raise ValueError(f"a header of {header_bytes} bytes in a file of {size}")
            header: dict[str, Any] = json.loads(opened.read(header_bytes))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        needed = 8 + header_bytes + max(ends, default=0)
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"model {name!r}: {file} is no safetensors file ({error}); download it again") from None
    if size < needed:
        raise ModelError(
            f"model {name!r}: {file} is cut short: {size} bytes of {needed}; download it again (was the disk full?)"
        )
    return header


def _read_json(name: str, file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"model {name!r}: {file} cannot be read as JSON ({error}); download it again") from None
    if not isinstance(found, dict):
        raise ModelError(f"model {name!r}: {file} holds no JSON object; download it again")
    return found
