"""`radix doctor MODEL`: what a model is, what runs it here, what it takes and whether it fits. Of
its weights nothing is read but the headers of their files."""

import argparse
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from ..checkpoint import check_checkpoint, has_weights
from ..config import INTEGER_QUANTIZATIONS, ServerArgs, flag_name
from ..errors import ConfigError
from ..hub import lacks_weights, read_json, resolve_model_path
from ..model_config import ModelConfig
from ..specs import Mixer, Mla, Mlp, Moe
from .doctor_facts import Facts, Problem

_GIB = 1 << 30
_MIB = 1 << 20
_RANKS = (1, 2, 4, 8)
_CONTEXTS = (2048, 8192, 32768)
_RESERVE = 0.05  # of the memory, for what is neither weights nor KV cache
_OPS = ("linear", "rmsnorm", "fused_qk_norm_rope_store", "flash_attn_with_kvcache",
        "silu_and_mul", "top_k_top_p_sampling")  # fmt: skip


_OF_MODEL = ("quantization", "dtype", "kv_cache_dtype", "device")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that are about a model."""
    what = "a directory, a GGUF file, a config.json or a hub name; without it: the installation"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=what)
    for name in _OF_MODEL:
        parser.add_argument(flag_name(name), help="of MODEL, as radix serve takes it")


def require_none(namespace: argparse.Namespace) -> None:
    """Raises ConfigError for a flag that is about a model, where none was named."""
    for name in _OF_MODEL:
        if getattr(namespace, name) is not None:
            raise ConfigError(f"{flag_name(name)} is of a model: radix doctor MODEL")


def model_facts(namespace: argparse.Namespace) -> Facts:
    """The rows about a model, and what is wrong with it here. Raises ConfigError."""
    path, config = _find(namespace.model)
    chosen = {name: getattr(namespace, name) for name in _OF_MODEL}
    args = ServerArgs(**{name: value for name, value in chosen.items() if value is not None})
    yield "model", _outline(config)
    if config.unknown_keys:
        yield "unknown keys", ", ".join(config.unknown_keys)
    files = None
    if has_weights(path) and not lacks_weights(namespace.model, path):
        files = check_checkpoint(path)
    build = import_module("radix_runtime.engine.planned_model").PlannedModel
    planned = build(config, args, path if files is not None else None)
    size = planned.size()
    stored = "no weights here" if files is None else f"{_size(files.bytes)} of files"
    yield "parameters", f"{_count(size.parameters)}, {stored}"
    yield "format", _format(config, args.quantization, planned.dtype)
    yield "attention", planned.attention_backend
    yield from _kernels(planned.dtype, size.special_ops)
    for kind in size.weight_kinds:
        implementation, _ = import_module("radix_runtime.ops").weight_kernel(
            kind, planned.device.kind, planned.dtype
        )
        yield f"  linear, {kind} weights", implementation
    yield from _memory(planned, args.quantization)
    planned.check()


def _find(name: str) -> tuple[Path, ModelConfig]:
    path = Path(name).expanduser()
    if path.suffix == ".json" and path.is_file():
        return path, ModelConfig.from_dict(read_json(path))
    path = resolve_model_path(name)
    return path, ModelConfig.from_dir(path)


def _outline(config: ModelConfig) -> str:
    spec = config.spec
    blocks = Counter(_block(layer.feed_forward) for layer in spec.layers)
    layers = ", ".join(f"{count} x {block}" for block, count in blocks.items())
    attention = ", ".join(dict.fromkeys(_heads(layer.mixer) for layer in spec.layers))
    return (
        f"{config.architecture}, hidden size {spec.hidden_size}, {layers}, {attention}, "
        f"context {config.max_context}"
    )


def _heads(mixer: Mixer) -> str:
    if isinstance(mixer, Mla):
        return f"{mixer.num_heads} heads over latents of {mixer.latent_dim} + {mixer.rope_dim}"
    return f"{mixer.num_heads} heads of {mixer.head_dim}, {mixer.num_kv_heads} KV heads"


def _block(feed_forward: Mlp | Moe) -> str:
    if isinstance(feed_forward, Mlp):
        return f"(attention, MLP of {feed_forward.width})"
    return f"(attention, {feed_forward.num_experts} experts of {feed_forward.width})"


def _format(config: ModelConfig, asked: str | None, dtype: str) -> str:
    """How the checkpoint holds its weights, and what they become here."""
    if config.quantization is None:
        return dtype if asked is None else f"{config.dtype}, quantized as it loads: {asked}"
    method = str(config.quantization.get("quant_method"))
    types = config.quantization.get("types")
    if isinstance(types, dict):
        counts = ", ".join(f"{n} {kind}" for kind, n in Counter(types.values()).most_common())
        method = f"{method} ({counts})"
    return f"{method}, computed in {dtype}"


def _kernels(dtype: str, special: tuple[str, ...]) -> Iterator[tuple[str, object]]:
    """Which implementation each op takes that the model needs."""
    implementations = import_module("radix_runtime.ops").capabilities()["ops"]
    for op in (*_OPS, *special):
        by_dtype = implementations.get(op, {})
        entry = by_dtype.get(dtype) or next(iter(by_dtype.values()), None)
        yield f"  {op}", "none" if entry is None else entry["impl"]


def _memory(planned: Any, asked: str | None) -> Facts:
    """Weights by number of ranks, KV cache by context, and whether they fit together."""
    sizes = _sizes(planned)
    by_ranks = ", ".join(f"TP {ranks} {_size(size)}" for ranks, size in sizes.items())
    yield "weights of a rank", by_ranks
    context = planned.config.max_context
    token = planned.token_bytes()
    contexts = [*(each for each in _CONTEXTS if each < context), context]
    by_context = ", ".join(f"{each} tokens {_size(each * token)}" for each in contexts)
    yield "KV cache", f"{token / 1024:g} KiB a token: {by_context}"
    memory = planned.device.memory()
    room = int(memory.available - _RESERVE * memory.total)
    yield "memory", f"{_size(memory.available)} available of {_size(memory.total)}"
    left = (room - sizes[1]) // token
    least = min(context, _CONTEXTS[0])
    if left >= context:
        yield "fits", f"yes, with up to {left} tokens of KV cache"
    elif left >= least:
        yield "fits", f"with {left} tokens of KV cache, of a context of {context}"
    else:
        yield "fits", "no"
        needed = _size(sizes[1] + least * token)
        what = f"weights and {least} tokens take {needed}, {_size(max(0, room))} are free"
        yield Problem(what, _remedy(planned, asked, room=room, least=least, sizes=sizes))


def _sizes(planned: Any) -> dict[int, int]:
    """Bytes of a rank's weights, for each number of ranks that the model can be split over."""
    sizes = {}
    for ranks in _RANKS:
        try:
            sizes[ranks] = planned.size(ranks).bytes
        except ConfigError:
            if ranks == 1:
                raise
    return sizes


def _remedy(
    planned: Any, asked: str | None, *, room: int, least: int, sizes: dict[int, int]
) -> str:
    """What would make it fit."""
    found = []
    can_quantize = planned.config.quantization is None and asked is None
    for name in INTEGER_QUANTIZATIONS if can_quantize else ():
        size = _quantized_bytes(planned, name)
        if size is not None and size + least * planned.token_bytes() <= room:
            found.append(f"--quantization {name} ({_size(size)})")
    if not planned.device.is_cpu:
        fitting = [n for n in sizes if sizes[n] + least * planned.token_bytes(n) <= room]
        found += [f"--tp-size {ranks}" for ranks in fitting[:1]]
    return " or ".join(found) or "use a machine with more memory, or a smaller model"


def _quantized_bytes(planned: Any, name: str) -> int | None:
    """Of the weights with `--quantization name`; None where that does not run here."""
    try:
        return int(planned.quantized_size(name).bytes)
    except ConfigError:
        return None


def _size(count: int) -> str:
    if count >= _GIB:
        return f"{count / _GIB:.2f} GiB"
    return f"{count / _MIB:.1f} MiB"


def _count(number: int) -> str:
    return f"{number / 1e9:.3g} B" if number >= 1e9 else f"{number / 1e6:.3g} M"
