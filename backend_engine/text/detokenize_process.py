"""The detokenizer's process: what the core said goes in, text and masks come out, one message for each step."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

from backend_engine.core.messages import Outputs
from backend_engine.text.child import begin, give_up, loaded
from backend_engine.text.grammar import Grammars
from backend_engine.text.maker import TextMaker
from backend_engine.text.tokenizer import token_texts_from
from backend_engine.text.wire import Open, Start, decode_to_detokenizer
from tracing.clock import SystemClock

log = logging.getLogger(__name__)


def main() -> int:
    """Loads, then works until it is ended."""
    _, line = begin("detokenize")
    try:
        start = decode_to_detokenizer(line.receive())
        assert isinstance(start, Start)
        began_ns = time.monotonic_ns()
        tokenizer = token_texts_from(Path(start.tokenizer_path).read_text())
        grammars = Grammars(tokenizer, start.vocab_size, start.eos_token_ids)
        grammars.prepare()
    except Exception as error:
        log.error("the tokenizer can't be loaded: %s", error, exc_info=not isinstance(error, ValueError))
        return give_up(line, error)
    maker = TextMaker(tokenizer, grammars, SystemClock())
    line.send(loaded(time.monotonic_ns() - began_ns))
    while True:
        message = decode_to_detokenizer(line.receive())
        said = None
        if isinstance(message, Outputs):
            said = maker.take(message)
        elif isinstance(message, Open):
            said = maker.open(message)
        if said is not None:
            line.send(said)


if __name__ == "__main__":
    sys.exit(main())
