"""ServerArgs: every setting of the runtime; the command line is generated from it.

The metadata of a field: `group` (its section of --help), `help`, `aliases` (other spellings of the
flag), `choices` (in any case), `spellings` (other names of choices), `unbuilt` (values that other
servers take, with the reason why this one does not), `built` (what it takes instead, where that are
not the choices), `minimum`.
"""

import math
import re
from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any

from .errors import ConfigError

DEFAULT_PORT = 30000
SECRETS = ("api_key", "admin_api_key", "metrics_api_key")  # settings that are never shown
# As browsers send it: no path (not even "/"), capitals or patterns, which would never match.
_ORIGIN = r"[a-z][a-z\d+.-]*://[^/,\sA-Z*?#@]+"
_ORIGINS = re.compile(rf"\*|{_ORIGIN}(,{_ORIGIN})*")
# Of a step on a CPU; `engine/device_defaults.py` has those of GPUs.
_CPU_REQUESTS = 64
_CPU_STEP_TOKENS = 512
_MOST_CPU_STEP_TOKENS = 2048  # where more requests run, which take a token each
_FLOATS = ("auto", "bfloat16", "float16", "float32")
_FLOAT_SPELLINGS = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
}
_KV_TYPES = (*_FLOATS, "int8", "fp8_e4m3")
_KV_SPELLINGS = {**_FLOAT_SPELLINGS, "fp8": "fp8_e4m3"}
# What --attention-backend and --quantization take without another package; the registries, which
# need torch, hold the classes.
ATTENTION_BACKENDS = ("paged", "triton", "torch_native")
FORMER_BACKENDS = {"radix": "paged"}  # former names, still taken
INTEGER_QUANTIZATIONS = ("int8", "int4")
_OTHER_GRAMMARS = ("xgrammar", "outlines", "lm-format-enforcer")
GRAMMAR_BACKENDS = ("llguidance", "none")
CHECKPOINT_FORMATS = ("awq", "gptq", "compressed-tensors", "gguf", "mxfp4")
QUANTIZATIONS = ("dense", *INTEGER_QUANTIZATIONS, "fp8", *CHECKPOINT_FORMATS)
# Other servers' names, and other models that write the same.
TOOL_PARSER_SPELLINGS = {
    "qwen": "hermes",
    "qwen25": "hermes",
    "llama3_json": "llama3",
    "qwen3_xml": "qwen3_coder",
    "minimax_m2": "minimax-m2",
    "deepseek_v3": "deepseekv3",
    "deepseek_v31": "deepseekv31",
    "openai": "gpt-oss",
}
REASONING_PARSER_SPELLINGS = {
    "deepseek_r1": "deepseek-r1",
    "minimax_m2": "minimax",
    "minimax-m2": "minimax",
    "openai_gptoss": "gpt-oss",
}


def _arg(group: str, default: Any, help: str, *aliases: str, **metadata: Any) -> Any:
    metadata = {"group": group, "help": help, "aliases": aliases, **metadata}
    return field(default=default, metadata=metadata)


_model = partial(_arg, "model")
_engine = partial(_arg, "engine")
_grammar = partial(_arg, "structured output")
_sched = partial(_arg, "scheduler")
_server = partial(_arg, "server")


@dataclass(slots=True)
class ServerArgs:
    """All settings with their defaults; None means "decide at start" and is resolved there."""

    # Model
    model_path: str | None = _model(
        None, "local directory or hub name; default: the embedded demo model", "--model"
    )
    revision: str | None = _model(None, "branch, tag or commit of a model of the hub")
    download_dir: str | None = _model(
        None, "where models of the hub are kept; default: the hub's cache"
    )
    tokenizer_path: str | None = _model(
        None, "directory of the tokenizer; default: the model's", "--tokenizer"
    )
    skip_tokenizer_init: bool = _model(
        False, "serve token ids only, by /generate with input_ids; no tokenizer is needed"
    )
    served_model_name: str | None = _model(
        None,
        "name that clients use; default: the hub name, or the last part of a path",
    )
    dtype: str = _model(
        "auto", "compute and weight type", choices=_FLOATS, spellings=_FLOAT_SPELLINGS
    )
    load_format: str = _model(
        "safetensors", "safetensors, or random weights", choices=("safetensors", "dummy")
    )
    quantization: str | None = _model(
        None, "quantize weights as they load: int8, int4, fp8, or a registered name"
    )
    context_length: int | None = _model(
        None, "prompt plus output; default: model's", "--max-model-len", minimum=2
    )
    chat_template: str | None = _model(None, "path of a chat template (jinja)")
    tool_call_parser: str = _model(
        "auto",
        "format of tool calls: a family, auto (by the chat template) or none",
        spellings=TOOL_PARSER_SPELLINGS,
    )
    reasoning_parser: str = _model(
        "auto",
        "format of reasoning: a family, auto (by the chat template) or none",
        spellings=REASONING_PARSER_SPELLINGS,
    )
    reasoning_field: str = _model(
        "reasoning_content",
        "the field of a message that has the reasoning",
        choices=("reasoning_content", "reasoning"),
    )
    sampling_defaults: str = _model(
        "model", "generation_config.json's or OpenAI's", choices=("model", "openai")
    )
    json_model_override_args: str = _model(
        "{}", "JSON object merged over config.json", "--hf-overrides"
    )
    random_seed: int | None = _model(
        None, "seed of requests without one, and of dummy weights", "--seed"
    )

    # Engine
    device: str = _engine("auto", "where the model runs", choices=("auto", "cpu", "cuda"))
    tp_size: int = _engine(
        1, "tensor-parallel ranks", "--tensor-parallel-size", "--tp", "-tp", minimum=1
    )
    disable_custom_all_reduce: bool = _engine(False, "GPU ranks exchange tensors by NCCL alone")
    num_threads: int | None = _engine(
        None, "CPU threads of all ranks together; default: all cores", minimum=1
    )
    attention_backend: str | None = _engine(
        None, "paged, triton, torch_native or a registered name; default: the best"
    )
    mem_fraction_static: float | None = _engine(
        None, "share of memory to use; GPU: all but 12 %, at most 5 GiB", "--gpu-memory-utilization"
    )
    max_total_tokens: int | None = _engine(None, "KV cache size in tokens", minimum=2)
    kv_cache_dtype: str = _engine(
        "auto",
        "KV cache; auto: the model's; int8 on the CPU, fp8_e4m3 on GPUs",
        choices=_KV_TYPES,
        spellings=_KV_SPELLINGS,
        unbuilt={"fp8_e5m2": "no kernel reads it; fp8_e4m3 is as small and more precise"},
    )
    fp8_fast_accum: bool = _engine(
        False, "Hopper: sums of FP8 products may be kept to 14 bits, as other engines do: faster"
    )
    page_size: int = _engine(16, "tokens in a KV page", "--block-size", minimum=1)
    disable_cuda_graph: bool = _engine(False, "queue every kernel of a step by itself")
    disable_persistent_decoder: bool = _engine(
        False, "GPU: decode steps of few rows, too, run layer by layer instead of in one kernel"
    )
    cuda_graph_max_bs: int | None = _engine(
        None,
        "largest decode batch captured in a CUDA graph; default: --max-running-requests",
        minimum=1,
    )
    cuda_graph_bs: list[int] | None = _engine(  # noqa: RUF009
        None,
        "decode batch sizes captured in CUDA graphs; default: 1 to 8, then every 8",
        "--cudagraph-capture-sizes",
        minimum=1,
    )
    cuda_graph_max_tokens: int | None = _engine(
        None,
        "largest step with prompt tokens captured in a CUDA graph; 0: none; default: by model size",
        minimum=0,
    )
    trace: str | None = _engine(
        None, "file that gets the times of every step, of host and device, in Chrome's format"
    )
    disable_overlap_schedule: bool = _engine(
        False, "plan a step only after the one before has completed"
    )

    # Scheduler
    max_running_requests: int | None = _sched(
        None,
        "requests in a batch; default: by the device, "
        f"{_CPU_REQUESTS} on a CPU, up to 256 on a GPU",
        "--max-num-seqs",
        minimum=1,
    )
    max_queued_requests: int | None = _sched(
        None,
        "requests waiting before 503; default: no count, see the two below",
        "--max-num-queued-reqs",
        minimum=0,
    )
    max_queue_seconds: float = _sched(
        120.0, "estimated seconds of work waiting before 503", minimum=0
    )
    max_queue_bytes: int = _sched(
        512 << 20, "bytes that open requests may hold before 503", minimum=1 << 20
    )
    chunked_prefill_size: int | None = _sched(
        None,
        "tokens in a step, -1: whole prompts; default: by the device, "
        f"{_CPU_STEP_TOKENS} on a CPU, up to 16384 on a GPU",
        "--max-num-batched-tokens",
    )
    schedule_policy: str = _sched(
        "fcfs", "fcfs, lpm (longest prefix) or a registered name", "--scheduling-policy"
    )
    schedule_age_bound: float = _sched(
        5.0, "seconds after which a waiting request goes first under lpm", minimum=0
    )
    schedule_conservativeness: float = _sched(
        1.0, "larger: admit fewer requests, retract less often", minimum=0
    )
    disable_radix_cache: bool = _sched(False, "do not share prefixes")
    radix_eviction_policy: str = _sched(
        "lru", "which cached prefix goes first", choices=("lru", "lfu", "fifo")
    )
    max_choices: int = _sched(16, "largest n of a request", minimum=1)
    check_invariants: str = _sched(
        "idle", "when the runtime checks its own state", choices=("off", "idle", "step")
    )

    # Structured output
    grammar_backend: str = _grammar(
        "llguidance",
        "llguidance, none (constraints are refused) or a registered name",
        unbuilt=dict.fromkeys(_OTHER_GRAMMARS, "it is not used here"),
        built=GRAMMAR_BACKENDS,
    )
    constrained_json_whitespace_pattern: str | None = _grammar(
        None,
        "regex of what may stand between the tokens of JSON; default: a space or an indented line",
    )
    constrained_json_disable_any_whitespace: bool = _grammar(
        False, "JSON without whitespace between its tokens"
    )
    grammar_timeout: float = _grammar(
        2.0, "seconds of CPU time that a grammar may take to compile", minimum=0.1
    )
    grammar_cache_size: int = _grammar(
        256 << 20, "bytes of compiled grammars that are kept for later requests", minimum=0
    )

    # Server
    host: str = _server("127.0.0.1", "address to bind")
    port: int = _server(DEFAULT_PORT, "port to bind; 0 takes a free one", minimum=0)
    api_processes: int = _server(
        1,
        "API processes behind the port; use more than one for many concurrent streams",
        "--api-server-count",
        "-asc",
        "--tokenizer-worker-num",
        minimum=1,
    )
    health_port: int | None = _server(
        None, "port of /health, /ready and /metrics that no load stalls", minimum=0
    )
    api_key: str | None = _server(None, "key that clients must send")
    api_key_file: str | None = _server(None, "file with one key a line")
    admin_api_key: str | None = _server(None, "key of the admin routes")
    admin_api_key_file: str | None = _server(None, "file with admin keys, one a line")
    metrics_api_key: str | None = _server(None, "key of /metrics; default: open")
    max_requests_per_key: int | None = _server(
        None, "open requests of one API key before 429", minimum=1
    )
    cache_salt_per_key: bool = _server(
        False, "requests of different API keys share no cached prefixes"
    )
    allowed_hosts: str | None = _server(
        None, "names of this server in Host, with commas, where it has no key; *: all"
    )
    allowed_origins: str | None = _server(
        None, "origins whose web pages may call, with commas; *: all; default: none"
    )
    drain_delay: float = _server(
        0.0, "seconds after SIGTERM that requests are still admitted, unready", minimum=0
    )
    drain_timeout: float = _server(
        8.0, "seconds that open requests have to end after that", minimum=0
    )
    max_connections: int = _server(4096, "open connections before 503", minimum=1)
    max_body_size: int = _server(8 << 20, "largest request body in bytes", minimum=1024)
    request_timeout: float | None = _server(
        None, "seconds after which a request is ended", minimum=0.001
    )
    step_timeout: float = _server(
        30.0, "seconds after which a step counts as hung", "--watchdog-timeout", minimum=1
    )
    allow_unknown_fields: bool = _server(
        False, "ignore unknown request fields (listed in `warnings`)"
    )
    enable_docs: bool = _server(False, "serve /docs and /openapi.json")
    log_level: str = _server("info", "log level", choices=("debug", "info", "warning", "error"))
    profile_dir: str | None = _server(
        None, "folder for the traces of /start_profile and /stop_profile, which it enables"
    )
    log_requests: bool = _server(False, "log one line a request (never its text)")
    skip_server_warmup: bool = _server(False, "be ready without a first token")

    def __post_init__(self) -> None:
        for setting in fields(self):
            value = getattr(self, setting.name)
            is_name = "choices" in setting.metadata or "spellings" in setting.metadata
            if is_name and isinstance(value, str):
                spellings = setting.metadata.get("spellings", {})
                setattr(self, setting.name, spellings.get(value.lower(), value.lower()))

    @property
    def running_limit(self) -> int:
        """Requests in a batch; where nobody has said, as many as a CPU takes."""
        return self.max_running_requests or _CPU_REQUESTS

    @property
    def step_tokens(self) -> int:
        """Tokens in a step, -1: whole prompts; where nobody has said, as many as a CPU takes."""
        most = max(_CPU_STEP_TOKENS, min(self.running_limit, _MOST_CPU_STEP_TOKENS))
        return self.chunked_prefill_size or most

    def validate(self) -> None:
        """Raises ConfigError on a value that cannot work, naming the flag."""
        for setting in fields(self):
            self._check_field(setting)
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static < 1:
            raise ConfigError("--mem-fraction-static must be between 0 and 1")
        step = self.chunked_prefill_size
        if step is not None and step != -1 and step < 3:
            # Less would cut three tokens into two and one; a step never computes one alone.
            raise ConfigError("--chunked-prefill-size must be -1 or at least 3")
        if self.skip_tokenizer_init and (self.tokenizer_path or self.chat_template):
            raise ConfigError("--skip-tokenizer-init excludes --tokenizer-path and --chat-template")
        if self.disable_radix_cache and self.schedule_policy == "lpm":
            raise ConfigError("--schedule-policy lpm needs the radix cache")
        needs_keys = self.max_requests_per_key is not None or self.cache_salt_per_key
        if needs_keys and self.api_key is None and self.api_key_file is None:
            raise ConfigError("--max-requests-per-key and --cache-salt-per-key need --api-key-file")
        if (
            self.constrained_json_disable_any_whitespace
            and self.constrained_json_whitespace_pattern is not None
        ):
            raise ConfigError(
                "--constrained-json-whitespace-pattern and "
                "--constrained-json-disable-any-whitespace exclude each other"
            )
        if not _ORIGINS.fullmatch(self.allowed_origins or "*"):
            names = "* or, as browsers send them, names like https://a.example,https://b.example"
            raise ConfigError(f"--allowed-origins must be {names}; got {self.allowed_origins!r}")

    def _check_field(self, setting: Field[Any]) -> None:
        flag = flag_name(setting.name)
        value = getattr(self, setting.name)
        minimum = setting.metadata.get("minimum")
        choices = setting.metadata.get("choices")
        numbers = value if isinstance(value, list) else [value]
        for number in numbers:
            if minimum is not None and number is not None and not minimum <= number < math.inf:
                raise ConfigError(f"{flag} must be at least {minimum}, and finite, got {number}")
        if value in ("", []):  # as from a shell variable that is not set
            raise ConfigError(f"{flag} must not be empty")
        unbuilt = setting.metadata.get("unbuilt", {})
        if isinstance(value, str) and value in unbuilt:
            there = setting.metadata.get("built") or choices or ()
            reason = f"{unbuilt[value]}; there are {', '.join(there)}"
            raise ConfigError(f"{flag} {value}: {reason}")
        if choices and value not in choices:
            raise ConfigError(f"{flag} must be one of {', '.join(choices)}, got {value!r}")


def flag_name(field_name: str) -> str:
    """The command-line flag of a field of ServerArgs."""
    return "--" + field_name.replace("_", "-")
