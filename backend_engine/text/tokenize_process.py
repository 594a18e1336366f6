"""The tokenizer's process: chat template and encoding, one job after another, in their order."""

from __future__ import annotations

import logging
import os
import sys
import time
from pathlib import Path

from backend_engine.text.child import Line, begin, give_up, loaded
from backend_engine.text.service import encode_with
from backend_engine.text.tokenizer import Tokenizer, load_tokenizer, prepare_tokenizer
from backend_engine.text.wire import Decode, Done, Encode, Name, Refused, Start, ToTokenizer, decode_to_tokenizer
from protocol.errors import ApiError

log = logging.getLogger(__name__)


def main() -> int:
    """Loads, then works until it is ended."""
    began_ns = time.monotonic_ns()
    settings, line = begin("tokenize")
    try:
        prepare_tokenizer(settings)
        waited_from_ns = time.monotonic_ns()
        start = decode_to_tokenizer(line.receive())
        assert isinstance(start, Start)
        began_ns += time.monotonic_ns() - waited_from_ns
        tokenizer = load_tokenizer(settings)
        _hand_over(tokenizer, Path(start.tokenizer_path))
    except Exception as error:
        log.error("the tokenizer can't be loaded: %s", error, exc_info=not isinstance(error, ValueError))
        return give_up(line, error)
    line.send(loaded(time.monotonic_ns() - began_ns, tokenizer.tool_format))
    while True:
        _work(line, tokenizer)


def _hand_over(tokenizer: Tokenizer, path: Path) -> None:
    """Writes the detokenizer's half; several processes may do it at once."""
    draft = path.with_suffix(f".{os.getpid()}")
    draft.write_text(tokenizer.to_json())
    draft.rename(path)


def _work(line: Line, tokenizer: Tokenizer) -> None:
    job = decode_to_tokenizer(line.receive())
    if isinstance(job, Start):
        return
    try:
        line.send(_done(job, tokenizer))
    except ApiError as error:
        line.send(Refused(job.job, error.status, error.code, error.message, error.param))
    except Exception:
        log.exception("a text could not be tokenised")
        message = "The engine's tokenizer failed on this request; the engine's log says why."
        line.send(Refused(job.job, 500, "internal_error", message, None))


def _done(job: ToTokenizer, tokenizer: Tokenizer) -> Done:
    began_ns = time.monotonic_ns()
    if isinstance(job, Encode):
        tokens = encode_with(tokenizer, job.source, job.grammar)
        return Done(job.job, time.monotonic_ns() - began_ns, tokens=tokens)
    if isinstance(job, Decode):
        text = tokenizer.decode(job.tokens, special=True)
        return Done(job.job, time.monotonic_ns() - began_ns, text=text)
    assert isinstance(job, Name)
    return Done(job.job, time.monotonic_ns() - began_ns, names=tokenizer.token_names(job.tokens))


if __name__ == "__main__":
    sys.exit(main())
