"""A frontend without sockets: its ASGI application, a core that the test plays, and a clock that the test owns."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from backend_engine.access import OneKey
from backend_engine.app import EngineApp
from backend_engine.core.messages import (
    Abort,
    Finished,
    Gauges,
    Output,
    Outputs,
    Ready,
    Scheduled,
    Step,
    Submit,
    ToCore,
    decode_to_core,
    encode,
)
from backend_engine.frontend import Frontend
from backend_engine.metrics import EngineMetrics
from backend_engine.spans import SpanWriter
from backend_engine.text.byte_tokenizer import EOS, VOCAB_SIZE, ByteTokenizer
from backend_engine.text.grammar import Grammars
from backend_engine.text.service import LocalText
from backend_engine.text.tokenizer import Messages, Tokenizer
from backend_engine.text.tool_formats import HERMES
from protocol.timings import EngineState, HostIdentity
from settings.schema import EngineSettings, Settings
from tracing.clock import FakeClock

HOST = HostIdentity("host-1", "boot-1")
MAX_MODEL_LEN = 64
STATE = EngineState(running=3, waiting=2, kv_usage=0.25, batch=4)
TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


def ready(**changes: Any) -> Ready:
    facts: dict[str, Any] = {
        "device": "simulated",
        "dtype": "none",
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": VOCAB_SIZE,
        "weight_bytes": 0,
        "kv_pages": 100,
        "page_size": 16,
        "eos_token_ids": (EOS,),
    }
    return Ready(**facts | changes)


class PlayedCore:
    """Stands where the ZeroMQ link stands; the test says what the core does. Every message passes through msgpack."""

    def __init__(self, clock: FakeClock) -> None:
        self.sent: list[ToCore] = []
        self._clock = clock
        self.frontend: Frontend
        self.gauges = Gauges(0, 0, 0, 100)

    def send(self, message: ToCore) -> None:
        self.sent.append(decode_to_core(encode(message)))

    @property
    def submits(self) -> list[Submit]:
        return [message for message in self.sent if isinstance(message, Submit)]

    @property
    def aborts(self) -> list[Abort]:
        return [message for message in self.sent if isinstance(message, Abort)]

    def say(self, *outputs: Output, steps: tuple[Step, ...] = (), gauges: Gauges | None = None) -> None:
        self.frontend.take(encode(Outputs(list(outputs), list(steps), gauges or self.gauges)))

    def scheduled(self, *, queue_ms: float = 5, prefill_ms: float = 20) -> Scheduled:
        start = self._clock.advance_ms(queue_ms)
        return Scheduled(start, self._clock.advance_ms(prefill_ms), 1, 0, STATE)

    def output(self, submit: Submit, tokens: list[int], *, is_first: bool, **times: float) -> Output:
        """The next step's output for a request; time moves on to the end of that step."""
        if not is_first:
            return Output(submit.request_id, tokens, self._clock.advance_ms(times.get("step_ms", 20)))
        scheduled = self.scheduled(**times)
        return Output(submit.request_id, tokens, scheduled.prefill_end_ns, scheduled)

    def first(self, submit: Submit, text: bytes, reason: str | None = None, **times: float) -> None:
        self._step(self.output(submit, list(text), is_first=True, **times), reason, len(text))

    def more(self, submit: Submit, text: bytes, reason: str | None = None, tokens: int = 0, **times: float) -> None:
        self._step(self.output(submit, list(text), is_first=False, **times), reason, tokens)

    def _step(self, output: Output, reason: str | None, tokens: int) -> None:
        """With a reason, the request ends with this step, `tokens` long."""
        finished = self.finished(reason, tokens) if reason else None
        self.say(Output(output.request_id, output.tokens, output.step_end_ns, output.scheduled, finished))

    def finished(self, reason: str, tokens: int, **changes: Any) -> Finished:
        now = self._clock.mono_ns()
        facts: dict[str, Any] = {
            "reason": reason,
            "last_token_ns": now if tokens else None,
            "ended_ns": now,
            "output_tokens": tokens,
            "steps": max(0, tokens - 1),
            "batch_sum": 4 * max(0, tokens - 1),
            "gap_ns": 1_500_000,
        }
        return Finished(**facts | changes)

    def last_word(self, submit: Submit, finished: Finished) -> None:
        self.say(Output(submit.request_id, [], finished.ended_ns, None, finished))


class Call:
    """One HTTP request in ASGI. `parts` are the body's pieces; more can be withheld by `is_open`."""

    def __init__(self, app: EngineApp, path: str, parts: list[bytes], headers: dict[str, str], method: str) -> None:
        self._gone = asyncio.Event()
        self._parts = list(parts)
        self.parts_read = 0
        self.messages: list[dict[str, Any]] = []
        self._scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
        }
        self.task = asyncio.create_task(self._run(app))

    async def _run(self, app: EngineApp) -> None:
        await app(self._scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        if self.parts_read < len(self._parts):
            part = self._parts[self.parts_read]
            self.parts_read += 1
            return {"type": "http.request", "body": part, "more_body": self.parts_read < len(self._parts)}
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        if not self._gone.is_set():
            self.messages.append(message)

    def leave(self) -> None:
        """The client closes the connection."""
        self._gone.set()

    @property
    def status(self) -> int:
        return int(self.messages[0]["status"])

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.messages[0]["headers"]}

    @property
    def chunks(self) -> list[bytes]:
        return [message["body"] for message in self.messages[1:] if message.get("body")]

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return self.json["error"]

    @property
    def events(self) -> list[Any]:
        """Data of the stream's events, parsed; `[DONE]` as that text."""
        data = [event.removeprefix(b"data: ") for event in self.body.split(b"\n\n") if event]
        return ["[DONE]" if event == b"[DONE]" else json.loads(event) for event in data]

    @property
    def is_ended(self) -> bool:
        return bool(self.messages) and not self.messages[-1].get("more_body", False)


class Harness:
    """Everything together. The model is the byte tokenizer's, `max_model_len` 64."""

    def __init__(
        self,
        state_dir: Path,
        *,
        is_loaded: bool = True,
        key: str | None = None,
        tokenizer: Tokenizer | None = None,
        exporter: SpanExporter | None = None,
        features: tuple[str, ...] = (),
        **sections: Any,
    ) -> None:
        self.clock = FakeClock()
        sections = {"engine": EngineSettings(device="simulated")} | sections
        self.settings = Settings(state_dir=state_dir, **sections)
        self.core = PlayedCore(self.clock)
        self.exporter = InMemorySpanExporter()
        self.span_writer = SpanWriter(exporter or self.exporter, HOST, self.settings.engine_model_name)
        metrics = EngineMetrics(self.settings, self.clock)
        self.text = LocalText(self.settings, self.clock)
        self.frontend = Frontend(self.settings, self.core, self.text, self.clock, metrics, self.span_writer)
        self.core.frontend = self.frontend
        self.app = EngineApp(self.frontend, HOST, "http://127.0.0.1:8080/api", OneKey(key) if key else None)
        self._tokenizer = tokenizer or ByteTokenizer()
        self._features = features
        if is_loaded:
            self.load()

    def load(self) -> None:
        said = ready(features=self._features)
        self.frontend.take(encode(said))
        grammars = Grammars(self._tokenizer, said.vocab_size, said.eos_token_ids)
        self.text.use(self._tokenizer, grammars, self.frontend)

    def call(
        self,
        path: str = "/v1/chat/completions",
        body: Any = None,
        *,
        method: str = "POST",
        headers: dict[str, str] | None = None,
        parts: list[bytes] | None = None,
    ) -> Call:
        """Starts a request; a body that is not bytes is sent as JSON."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return Call(self.app, path, parts if parts is not None else [data], headers or {}, method)

    async def submitted(self, call: Call, at: int = 0) -> Submit:
        """Lets a call run up to where the core has its request."""
        await settle()
        assert len(self.core.submits) > at, call.messages
        return self.core.submits[at]

    def spans(self) -> dict[str, ReadableSpan]:
        """The finished spans by name."""
        self.span_writer.flush()
        return {span.name: span for span in self.exporter.get_finished_spans()}

    def metric(self, name: str, **labels: str) -> float | None:
        return self.frontend.metrics.registry.get_sample_value(
            f"tokenline_engine_{name}", {"model": self.settings.engine_model_name} | labels
        )


async def settle(turns: int = 10) -> None:
    """Lets every task run until it waits for something that only the test can bring."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def done(*calls: Call) -> None:
    """Waits for calls to end."""
    waiting: list[Awaitable[None]] = [call.task for call in calls]
    await asyncio.wait_for(asyncio.gather(*waiting), 5)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "simulated", "messages": [{"role": "user", "content": "hi"}]} | fields


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": "simulated", "prompt": "hi"} | fields


FEATURES = ("min_p", "penalties", "logit_bias", "logprobs", "min_tokens", "masks")


class ToolTokenizer(ByteTokenizer):
    """A model whose template shows tools, calls and results."""

    tool_format: str | None = HERMES

    def encode_chat(
        self, messages: Messages, *, open_answer: bool = True, tools: Sequence[dict[str, Any]] = ()
    ) -> list[int]:
        names = [tool["function"]["name"] for tool in tools]
        calls = [call["function"]["arguments"] for message in messages for call in message.get("tool_calls", ())]
        results = [message["content"] for message in messages if message["role"] == "tool"]
        return self.encode(f"{names}{calls}{results}")


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
