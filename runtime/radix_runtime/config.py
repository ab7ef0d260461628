"""ServerArgs: every setting of the runtime; the command line is generated from it.

The metadata of a field: `group` (its section of --help), `help`, `aliases` (other spellings of the
flag), `choices` (in any case), `spellings` (other names of choices), `unbuilt` (values that other
servers take, with the reason why this one does not), `minimum`.
"""

import math
import re
from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any

from .errors import ConfigError

DEFAULT_PORT = 30000
SECRETS = ("api_key", "admin_api_key")  # settings that are never shown
# As browsers send it: no path (not even "/"), capitals or patterns, which would never match.
_ORIGIN = r"[a-z][a-z\d+.-]*://[^/,\sA-Z*?#@]+"
_ORIGINS = re.compile(rf"\*|{_ORIGIN}(,{_ORIGIN})*")
_FLOATS = ("auto", "bfloat16", "float16", "float32")
_FLOAT_SPELLINGS = {
    "half": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "fp32": "float32",
}
_SMALL_KV_TYPES = ("fp8", "fp8_e4m3", "fp8_e5m2", "int8")
# What --attention-backend and --quantization take without another package; the registries, which
# need torch, hold the classes.
ATTENTION_BACKENDS = ("paged", "triton", "torch_native")
FORMER_BACKENDS = {"radix": "paged"}  # former names, still taken
CPU_QUANTIZATIONS = ("int8", "int4")
QUANTIZATIONS = ("dense", *CPU_QUANTIZATIONS)


def _arg(group: str, default: Any, help: str, *aliases: str, **metadata: Any) -> Any:
    metadata = {"group": group, "help": help, "aliases": aliases, **metadata}
    return field(default=default, metadata=metadata)


_model = partial(_arg, "model")
_engine = partial(_arg, "engine")
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
    served_model_name: str | None = _model(None, "name shown by /v1/models")
    dtype: str = _model(
        "auto", "compute and weight type", choices=_FLOATS, spellings=_FLOAT_SPELLINGS
    )
    load_format: str = _model(
        "safetensors", "safetensors, or random weights", choices=("safetensors", "dummy")
    )
    quantization: str | None = _model(
        None, "int8 or int4 quantizes weights as they load (CPU), or a registered name"
    )
    context_length: int | None = _model(
        None, "prompt plus output; default: model's", "--max-model-len", minimum=2
    )
    chat_template: str | None = _model(None, "path of a chat template (jinja)")
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
        None, "share of memory to use; GPU: 0.88", "--gpu-memory-utilization"
    )
    max_total_tokens: int | None = _engine(None, "KV cache size in tokens", minimum=2)
    kv_cache_dtype: str = _engine(
        "auto",
        "KV cache; auto: the model's",
        choices=_FLOATS,
        spellings=_FLOAT_SPELLINGS,
        unbuilt=dict.fromkeys(_SMALL_KV_TYPES, "the KV cache is not quantized yet"),
    )
    page_size: int = _engine(16, "tokens in a KV page", "--block-size", minimum=1)
    disable_overlap_schedule: bool = _engine(
        False, "plan a step only after the one before has completed"
    )

    # Scheduler
    max_running_requests: int = _sched(64, "requests in a batch", "--max-num-seqs", minimum=1)
    max_queued_requests: int | None = _sched(
        None,
        "requests waiting before 503; default: max(64, 4 x running)",
        "--max-num-queued-reqs",
        minimum=0,
    )
    chunked_prefill_size: int = _sched(
        2048, "tokens in a step; -1: whole prompts", "--max-num-batched-tokens"
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

    # Server
    host: str = _server("127.0.0.1", "address to bind")
    port: int = _server(DEFAULT_PORT, "port to bind; 0 takes a free one", minimum=0)
    api_key: str | None = _server(None, "key that clients must send")
    api_key_file: str | None = _server(None, "file with one key a line")
    admin_api_key: str | None = _server(None, "key of the admin routes")
    allowed_origins: str | None = _server(
        None, "origins whose web pages may call, with commas; *: all; default: none"
    )
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
            if "choices" in setting.metadata and isinstance(value, str):
                spellings = setting.metadata.get("spellings", {})
                setattr(self, setting.name, spellings.get(value.lower(), value.lower()))

    @property
    def queue_limit(self) -> int:
        """Requests that may wait before a 503."""
        if self.max_queued_requests is not None:
            return self.max_queued_requests
        return max(64, 4 * self.max_running_requests)

    def validate(self) -> None:
        """Raises ConfigError on a value that cannot work, naming the flag."""
        for setting in fields(self):
            self._check_field(setting)
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static < 1:
            raise ConfigError("--mem-fraction-static must be between 0 and 1")
        if self.chunked_prefill_size != -1 and self.chunked_prefill_size < 3:
            # Less would cut three tokens into two and one; a step never computes one alone.
            raise ConfigError("--chunked-prefill-size must be -1 or at least 3")
        if self.disable_radix_cache and self.schedule_policy == "lpm":
            raise ConfigError("--schedule-policy lpm needs the radix cache")
        if not _ORIGINS.fullmatch(self.allowed_origins or "*"):
            names = "* or, as browsers send them, names like https://a.example,https://b.example"
            raise ConfigError(f"--allowed-origins must be {names}; got {self.allowed_origins!r}")

    def _check_field(self, setting: Field[Any]) -> None:
        flag = flag_name(setting.name)
        value = getattr(self, setting.name)
        minimum = setting.metadata.get("minimum")
        choices = setting.metadata.get("choices")
        if minimum is not None and value is not None and not minimum <= value < math.inf:
            raise ConfigError(f"{flag} must be at least {minimum}, and finite, got {value}")
        if value == "":  # as from a shell variable that is not set
            raise ConfigError(f"{flag} must not be empty")
        unbuilt = setting.metadata.get("unbuilt", {})
        if value in unbuilt:
            reason = f"{unbuilt[value]}; there are {', '.join(choices or ())}"
            raise ConfigError(f"{flag} {value}: {reason}")
        if choices and value not in choices:
            raise ConfigError(f"{flag} must be one of {', '.join(choices)}, got {value!r}")


def flag_name(field_name: str) -> str:
    """The command-line flag of a field of ServerArgs."""
    return "--" + field_name.replace("_", "-")
