"""ServerArgs: every setting of the runtime, once. The command line is generated from it.

A field's metadata: `help`, `aliases` (other spellings of the flag, vLLM's or short ones),
`choices`, `group` (section of --help). `flag_name` of field `tp_size` is `--tp-size`; booleans are switches.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from .errors import ConfigError

DEFAULT_PORT = 30000


def _arg(
    default: Any, help: str, *, group: str, aliases: tuple[str, ...] = (), **extra: Any
) -> Any:
    metadata = {"help": help, "group": group, "aliases": aliases, **extra}
    return field(default=default, metadata=metadata)


@dataclass(slots=True)
class ServerArgs:
    """All settings with their defaults; None means "decide at start" and is resolved there."""

    # Model
    model_path: str | None = _arg(
        None, "local directory or hub name; default: the embedded demo model", group="model",
        aliases=("--model",),
    )  # fmt: skip
    tokenizer_path: str | None = _arg(
        None, "directory of the tokenizer; default: the model's", group="model",
        aliases=("--tokenizer",),
    )  # fmt: skip
    served_model_name: str | None = _arg(None, "name shown by /v1/models", group="model")
    dtype: str = _arg(
        "auto", "compute and weight type", group="model",
        choices=("auto", "bfloat16", "float16", "float32"),
    )  # fmt: skip
    load_format: str = _arg(
        "safetensors", "safetensors, or dummy for random weights", group="model",
        choices=("safetensors", "dummy"),
    )  # fmt: skip
    quantization: str | None = _arg(None, "weight quantization format", group="model")
    context_length: int | None = _arg(
        None, "longest prompt plus output in tokens; default: the model's", group="model",
        aliases=("--max-model-len",),
    )  # fmt: skip
    chat_template: str | None = _arg(None, "path of a chat template (jinja)", group="model")
    sampling_defaults: str = _arg(
        "model", "defaults for absent sampling parameters: generation_config.json or OpenAI's",
        group="model", choices=("model", "openai"),
    )  # fmt: skip
    json_model_override_args: str = _arg(
        "{}", "JSON object merged over config.json", group="model", aliases=("--hf-overrides",)
    )
    random_seed: int = _arg(0, "seed of dummy weights", group="model", aliases=("--seed",))

    # Engine
    device: str = _arg(
        "auto", "where the model runs", group="engine", choices=("auto", "cpu", "cuda")
    )
    tp_size: int = _arg(
        1, "tensor-parallel ranks", group="engine",
        aliases=("--tensor-parallel-size", "--tp", "-tp"),
    )  # fmt: skip
    num_threads: int | None = _arg(
        None, "CPU threads of all ranks together; default: the cores of this process",
        group="engine",
    )  # fmt: skip
    attention_backend: str | None = _arg(
        None, "radix, triton, torch_native or a registered name; default: the best that runs",
        group="engine",
    )  # fmt: skip
    mem_fraction_static: float | None = _arg(
        None, "share of device memory for weights and KV cache; default 0.88 (GPU), 0.5 (CPU)",
        group="engine", aliases=("--gpu-memory-utilization",),
    )  # fmt: skip
    max_total_tokens: int | None = _arg(None, "KV cache size in tokens", group="engine")
    kv_cache_dtype: str = _arg(
        "auto", "type of the KV cache; auto: the model's", group="engine",
        choices=("auto", "bfloat16", "float16", "float32"),
    )  # fmt: skip
    page_size: int = _arg(16, "tokens in a KV page", group="engine", aliases=("--block-size",))
    disable_overlap_schedule: bool = _arg(
        False, "plan a step only after the one before has completed", group="engine"
    )

    # Scheduler
    max_running_requests: int = _arg(
        64, "requests in a batch", group="scheduler", aliases=("--max-num-seqs",)
    )
    max_queued_requests: int | None = _arg(
        None, "requests waiting before 503; default max(64, 4 x running)", group="scheduler",
        aliases=("--max-num-queued-reqs",),
    )  # fmt: skip
    chunked_prefill_size: int = _arg(
        2048, "token budget of a step; -1 puts a whole prompt into one step", group="scheduler",
        aliases=("--max-num-batched-tokens",),
    )  # fmt: skip
    schedule_policy: str = _arg(
        "fcfs", "order of the queue: fcfs, lpm (longest prefix match) or a registered name",
        group="scheduler", aliases=("--scheduling-policy",),
    )  # fmt: skip
    schedule_age_bound: float = _arg(
        5.0, "seconds after which a waiting request goes first under lpm", group="scheduler"
    )
    schedule_conservativeness: float = _arg(
        1.0, "larger: admit fewer requests, retract less often", group="scheduler"
    )
    disable_radix_cache: bool = _arg(False, "do not share prefixes", group="scheduler")
    radix_eviction_policy: str = _arg(
        "lru", "which cached prefix goes first", group="scheduler", choices=("lru", "lfu", "fifo")
    )
    max_choices: int = _arg(16, "largest n of a request", group="scheduler")
    check_invariants: str = _arg(
        "idle", "when the runtime checks its own state", group="scheduler",
        choices=("off", "idle", "step"),
    )  # fmt: skip

    # Server
    host: str = _arg("127.0.0.1", "address to bind", group="server")
    port: int = _arg(DEFAULT_PORT, "port to bind; 0 takes a free one", group="server")
    api_key: str | None = _arg(None, "key that clients must send", group="server")
    api_key_file: str | None = _arg(None, "file with one key a line", group="server")
    admin_api_key: str | None = _arg(None, "key of the admin routes", group="server")
    max_body_size: int = _arg(8 << 20, "largest request body in bytes", group="server")
    request_timeout: float | None = _arg(
        None, "seconds after which a request is ended", group="server"
    )
    step_timeout: float = _arg(
        30.0, "seconds a step may take before the engine counts as hung", group="server",
        aliases=("--watchdog-timeout",),
    )  # fmt: skip
    allow_unknown_fields: bool = _arg(
        False, "ignore unknown request fields (listed in `warnings`)", group="server"
    )
    enable_docs: bool = _arg(False, "serve /docs and /openapi.json", group="server")
    log_level: str = _arg(
        "info", "log level", group="server", choices=("debug", "info", "warning", "error")
    )
    log_requests: bool = _arg(False, "log one line a request (never its text)", group="server")
    skip_server_warmup: bool = _arg(False, "be ready without a first token", group="server")

    def validate(self) -> None:
        """Raises ConfigError on a value that cannot work, naming the flag."""
        for name, low in _MINIMUM.items():
            value = getattr(self, name)
            if value is not None and value < low:
                raise ConfigError(f"{flag_name(name)} must be at least {low}, got {value}")
        for f in fields(self):
            choices = f.metadata.get("choices")
            if choices and getattr(self, f.name) not in choices:
                raise ConfigError(
                    f"{flag_name(f.name)} must be one of {', '.join(choices)}, "
                    f"got {getattr(self, f.name)!r}"
                )
        if self.mem_fraction_static is not None and not 0 < self.mem_fraction_static < 1:
            raise ConfigError("--mem-fraction-static must be between 0 and 1")
        if self.chunked_prefill_size != -1 and self.chunked_prefill_size < 1:
            raise ConfigError("--chunked-prefill-size must be -1 or at least 1")
        if self.disable_radix_cache and self.schedule_policy == "lpm":
            raise ConfigError("--schedule-policy lpm needs the radix cache")

    @property
    def queue_limit(self) -> int:
        if self.max_queued_requests is not None:
            return self.max_queued_requests
        return max(64, 4 * self.max_running_requests)


_MINIMUM = {
    "tp_size": 1,
    "num_threads": 1,
    "page_size": 1,
    "max_running_requests": 1,
    "max_queued_requests": 0,
    "max_total_tokens": 1,
    "context_length": 1,
    "max_choices": 1,
    "schedule_conservativeness": 0,
    "port": 0,
    "step_timeout": 1,
}


def flag_name(field_name: str) -> str:
    return "--" + field_name.replace("_", "-")
