"""Attribute and span names: OpenTelemetry's where it has them, ours under `tokenline.`.

OpenTelemetry's GenAI conventions are still moving and its published Python constants are marked deprecated, so the
names are written down here (semantic conventions 1.37 and later; `gen_ai.latency.*` as vLLM and SGLang emit them).
"""

from __future__ import annotations

from typing import Final

GEN_AI_OPERATION: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_REQUEST_ID: Final = "gen_ai.request.id"
GEN_AI_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_TOP_P: Final = "gen_ai.request.top_p"

# As vLLM and SGLang put them on `llm_request`; seconds.
LATENCY_QUEUE: Final = "gen_ai.latency.time_in_queue"
LATENCY_PREFILL: Final = "gen_ai.latency.time_in_model_prefill"
LATENCY_DECODE: Final = "gen_ai.latency.time_in_model_decode"
LATENCY_INFERENCE: Final = "gen_ai.latency.time_in_model_inference"
LATENCY_TTFT: Final = "gen_ai.latency.time_to_first_token"
LATENCY_E2E: Final = "gen_ai.latency.e2e"

# As vLLM and SGLang name their counts.
PROMPT_TOKENS_OF_ENGINES: Final = "gen_ai.usage.prompt_tokens"
COMPLETION_TOKENS_OF_ENGINES: Final = "gen_ai.usage.completion_tokens"
CACHED_TOKENS_OF_ENGINES: Final = "gen_ai.usage.cached_tokens"

BOOT_ID: Final = "host.boot_id"
"""Beside OpenTelemetry's host.id: which boot of it, since a clock is one boot's."""

HTTP_METHOD: Final = "http.request.method"
HTTP_ROUTE: Final = "http.route"
HTTP_STATUS: Final = "http.response.status_code"
URL_PATH: Final = "url.path"
URL_SCHEME: Final = "url.scheme"
SERVER_ADDRESS: Final = "server.address"
ERROR_TYPE: Final = "error.type"

REQUEST_ID: Final = "tokenline.request_id"
CLIENT_REQUEST_ID: Final = "tokenline.client_request_id"
UPSTREAM: Final = "tokenline.upstream"
SURFACE: Final = "tokenline.surface"
OUTCOME: Final = "tokenline.outcome"
KEY_ALIAS: Final = "tokenline.key_alias"
TEAM: Final = "tokenline.team"
ATTEMPT: Final = "tokenline.attempt"
CONNECTION_REUSED: Final = "tokenline.connection_reused"
TTFT: Final = "tokenline.ttft"
TPOT: Final = "tokenline.tpot"
UNACCOUNTED: Final = "tokenline.unaccounted"
PLACEMENT: Final = "tokenline.placement"
DERIVED: Final = "tokenline.derived"
SIMULATED: Final = "tokenline.simulated"

ENGINE_RUNNING: Final = "tokenline.engine.running"
ENGINE_WAITING: Final = "tokenline.engine.waiting"
ENGINE_KV_USAGE: Final = "tokenline.engine.kv_usage"
ENGINE_BATCH: Final = "tokenline.engine.batch_size"
PROMPT_TOKENS: Final = "tokenline.prompt_tokens"
CACHED_TOKENS: Final = "tokenline.cached_tokens"
PREFILL_CHUNKS: Final = "tokenline.prefill_chunks"
OUTPUT_TOKENS: Final = "tokenline.output_tokens"
DECODE_STEPS: Final = "tokenline.decode_steps"
MEAN_BATCH: Final = "tokenline.mean_batch"
TIMINGS: Final = "tokenline.timings"
"""JSON of protocol.timings.Timings on `llm_request`: exact marks also of requests whose answer never came in band."""
TOKEN_GAP: Final = "tokenline.token_gap_seconds"
ABORT_SECONDS: Final = "tokenline.abort_propagation_seconds"
WASTED_TOKENS: Final = "tokenline.wasted_tokens"

SPAN_LLM_REQUEST: Final = "llm_request"
SPAN_TOKENIZE: Final = "tokenize"
SPAN_QUEUE: Final = "queue"
SPAN_PREFILL: Final = "prefill"
SPAN_DECODE: Final = "decode"
SPAN_DETOKENIZE: Final = "detokenize"
ENGINE_CHILDREN: Final = (SPAN_TOKENIZE, SPAN_QUEUE, SPAN_PREFILL, SPAN_DECODE, SPAN_DETOKENIZE)
EVENT_PREEMPTED: Final = "preempted"
"""On the engine's request span: slot and pages were taken in favour of others."""
