"""GGUF files, de-quantised once into a folder of safetensors, tokenizer and chat template in the user's cache.

A conversion is made in a folder beside its place and renamed when it is whole, so one that was cut short is never used.
A file lock lets one process convert while others wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from platformdirs import user_cache_dir

from backend_engine.models.errors import OTHER_ENGINE, ModelError

_FORMAT = 1
"""Raised when what a conversion writes changes, so that older ones are not read."""
_PART = ".part"
_HASHED_BYTES = 2**30


def cache_folder() -> Path:
    """TOKENLINE_CACHE_DIR, else the platform's cache folder of the user."""
    return Path(os.environ.get("TOKENLINE_CACHE_DIR") or user_cache_dir("tokenline")) / "models"


def convert_once(name: str, gguf: Path) -> Path:
    """The folder that holds `gguf` converted; converts when it isn't there yet."""
    folder = cache_folder() / f"{gguf.stem}-{_identity(gguf)}"
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_name(folder.name + ".lock")):
        if not folder.is_dir():
            part = folder.with_name(folder.name + _PART)
            shutil.rmtree(part, ignore_errors=True)  # of a conversion that was cut short: the lock is ours
            began = time.monotonic()
            print(f"tokenline: converting {gguf.name} to {folder} (once; about half a minute)", file=sys.stderr)
            with contextlib.redirect_stderr(io.StringIO()):  # three progress bars that a log file makes unreadable
                _convert(name, gguf, part)
            part.rename(folder)
            print(f"tokenline: converted in {time.monotonic() - began:.0f} s", file=sys.stderr)
    return folder


def _identity(gguf: Path) -> str:
    """The file's content where reading it is quick, so that copies share a conversion; else its path, size and time."""
    stat = gguf.stat()
    if stat.st_size <= _HASHED_BYTES:
        with gguf.open("rb") as opened:
            return f"{_FORMAT}-{hashlib.file_digest(opened, 'sha256').hexdigest()[:16]}"
    identity = f"{gguf.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    return f"{_FORMAT}-{hashlib.sha256(identity.encode()).hexdigest()[:16]}"


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An advisory lock that ends with its holder, however that ends."""
    with path.open("w") as opened:
        fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def _convert(name: str, gguf: Path, part: Path) -> None:
    _check_magic(name, gguf)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name, "local_files_only": True}
        tokenizer = AutoTokenizer.from_pretrained(**where)
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    except MemoryError:
        raise
    except Exception as error:
        raise ModelError(
            f"model {name!r}: {gguf} could not be read as a GGUF model ({type(error).__name__}: {error}). It may be "
            "cut short (download it again), or hold an architecture or quantisation that transformers does not read: "
            f"{OTHER_ENGINE}"
        ) from error
    # the weights are plain now; a quantisation left in the config would be looked for at the next load
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)


def _check_magic(name: str, gguf: Path) -> None:
    with gguf.open("rb") as opened:
        magic = opened.read(4)
    if magic != b"GGUF":
        raise ModelError(f"model {name!r}: {gguf} does not begin with GGUF, so it is no GGUF file; download it again")
