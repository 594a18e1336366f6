"""The other end of the measured core: text made in the core's own loop, or in a process of its own.

Either way every step's text is encoded and sent over ZeroMQ, as the engine does; at the far end it is thrown away.
"""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Protocol

import zmq

from backend_engine.core.messages import Outputs, encode
from backend_engine.measuring.host_times import DETOKENISE, SEND, HostTimes
from backend_engine.text.byte_tokenizer import EOS, VOCAB_SIZE, ByteTokenizer
from backend_engine.text.grammar import Grammars
from backend_engine.text.maker import TextMaker
from backend_engine.text.wire import Open, decode_to_detokenizer
from backend_engine.text.wire import encode as encode_text
from tracing.clock import SystemClock

_END = b"end"


class TextSide(Protocol):
    """What the loop does with what the core says."""

    def open(self, request_id: str) -> None:
        """An answer begins."""

    def deliver(self, outputs: Outputs) -> None:
        """One turn's outputs."""

    def close(self) -> float:
        """Ends it; ms of text making per step beside the loop."""


class TextInTheLoop:
    """Detokenises between two steps."""

    def __init__(self, folder: Path, times: HostTimes) -> None:
        self._times = times
        self._maker = _maker()
        self._sink = _Sink(folder)

    def open(self, request_id: str) -> None:
        self._maker.open(Open(request_id, stop_token_ids=(EOS,)))

    def deliver(self, outputs: Outputs) -> None:
        began_ns = time.perf_counter_ns()
        texts = self._maker.take(outputs)
        made_ns = time.perf_counter_ns()
        self._times.add(DETOKENISE, made_ns - began_ns)
        self._sink.send(encode_text(texts))
        self._times.add(SEND, time.perf_counter_ns() - made_ns)

    def close(self) -> float:
        self._sink.close()
        return 0.0


class TextInAProcess:
    """Sends token ids to a process that detokenises beside the loop."""

    def __init__(self, folder: Path, times: HostTimes) -> None:
        self._times = times
        self._sink = _Sink(folder, makes_text=True)

    def open(self, request_id: str) -> None:
        self._sink.send(encode_text(Open(request_id, stop_token_ids=(EOS,))))

    def deliver(self, outputs: Outputs) -> None:
        began_ns = time.perf_counter_ns()
        self._sink.send(encode(outputs))
        self._times.add(SEND, time.perf_counter_ns() - began_ns)

    def close(self) -> float:
        return self._sink.close()


class _Sink:
    """A process at the other end of a socket."""

    def __init__(self, folder: Path, *, makes_text: bool = False) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PUSH)
        address = f"ipc://{folder}/text"
        self._socket.bind(address)
        context = multiprocessing.get_context("spawn")
        self._answer, theirs = context.Pipe(duplex=False)
        self._process = context.Process(target=_run_sink, args=(address, makes_text, theirs), daemon=True)
        self._process.start()
        if not self._answer.poll(60):
            raise RuntimeError("the text process did not start within 60 s")
        self._answer.recv()

    def send(self, data: bytes) -> None:
        self._socket.send(data)

    def close(self) -> float:
        self._socket.send(_END)
        per_step_ms = float(self._answer.recv()) if self._answer.poll(30) else 0.0
        self._process.join(10)
        self._context.destroy(linger=0)
        return per_step_ms


def _maker() -> TextMaker:
    tokenizer = ByteTokenizer()
    return TextMaker(tokenizer, Grammars(tokenizer, VOCAB_SIZE, (EOS,)), SystemClock())


def _run_sink(address: str, makes_text: bool, answer: multiprocessing.connection.Connection) -> None:
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.connect(address)
    maker = _maker()
    answer.send(True)
    spent_ns = steps = 0
    while (data := socket.recv()) != _END:
        if not makes_text:
            continue
        message = decode_to_detokenizer(data)
        if isinstance(message, Outputs):
            began_ns = time.perf_counter_ns()
            encode_text(maker.take(message))
            spent_ns += time.perf_counter_ns() - began_ns
            steps += 1
        elif isinstance(message, Open):
            maker.open(message)
    answer.send(spent_ns / steps / 1e6 if steps else 0.0)
    context.destroy(linger=0)
