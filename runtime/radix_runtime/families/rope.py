"""RoPE's settings in config.json, which files write in several ways."""

from collections.abc import Mapping
from typing import Any

from ..specs import Rope
from .checks import require

_ORIGINAL_CONTEXT = "original_max_position_embeddings"
_SCALING_KEYS: dict[str, tuple[str, ...]] = {  # what each type of scaling must give
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", _ORIGINAL_CONTEXT, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", _ORIGINAL_CONTEXT),
    "longrope": (_ORIGINAL_CONTEXT,),
    "mrope": (),  # three positions for what lies in an image; a token of text has the same three
}
_BASE_KEYS = ("rope_theta", "partial_rotary_factor")  # in the RoPE dictionary or beside it


def rope_settings(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What `raw`, a config.json or a part of one, says of RoPE, in one dictionary with
    transformers 5's names.

    transformers 5 writes `rope_parameters`, transformers 4 `rope_theta` and `rope_scaling`, whose
    type may be called "type". A key that is there and empty asks for plain RoPE. Raises
    ConfigError."""
    beside = {key: raw[key] for key in _BASE_KEYS if key in raw}
    if raw.get("rope_parameters"):
        given = raw["rope_parameters"]
    elif raw.get("rope_scaling"):
        given = raw["rope_scaling"]
    elif "rope_parameters" in raw or "rope_scaling" in raw:
        return beside | {"rope_type": "default"}
    else:
        return beside
    require(isinstance(given, dict), "rope_parameters and rope_scaling must be objects")
    settings = beside | given
    kind = settings.pop("type", None)
    if kind is not None:
        settings.setdefault("rope_type", kind)
    return settings


def merged_rope_settings(raw: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of `raw` with those of `changes` instead, key by key; another type of scaling
    brings all its own numbers. Raises ConfigError."""
    old = rope_settings(raw)
    new = rope_settings(changes)
    if new.get("rope_type", old.get("rope_type")) != old.get("rope_type"):
        old = {key: old[key] for key in _BASE_KEYS if key in old}
    return old | new


def read_rope(
    settings: Mapping[str, Any] | None,
    *,
    theta: float,
    partial: float,
    head_dim: int,
    max_positions: int,
    original_context: int | None,
    interleaved: bool = False,
) -> Rope:
    """RoPE by what `rope_settings` gave; `theta`, `partial` and `original_context` stand in for
    what is not among them. Raises ConfigError."""
    given = {key: value for key, value in (settings or {}).items() if value is not None}
    by_layer = any(isinstance(value, dict) for value in given.values())
    require(not by_layer, "rope_parameters that differ by layer are not supported")
    kind = given.pop("rope_type", "default")
    theta = given.pop("rope_theta", theta)
    partial = given.pop("partial_rotary_factor", partial)
    require(kind in _SCALING_KEYS, f"rope type {kind!r} is not supported")
    require(_is_positive(theta), f"rope_theta {theta!r} is not a positive number")
    is_inside = _is_positive(partial) and partial <= 1
    require(is_inside, f"partial_rotary_factor {partial!r} is not in (0, 1]")
    if original_context is None and kind == "yarn":
        original_context = max_positions
    for key in _SCALING_KEYS[kind]:
        if key == _ORIGINAL_CONTEXT:
            given.setdefault(key, original_context)
        value = given.get(key)
        require(_is_positive(value), f"rope scaling {kind!r} needs a positive {key}, got {value!r}")
    if kind == "longrope":
        given.setdefault("factor", max_positions / given[_ORIGINAL_CONTEXT])
    return Rope(
        theta=float(theta),
        rotary_dim=int(head_dim * partial),
        interleaved=interleaved,
        scaling=None if kind in ("default", "mrope") else given | {"rope_type": kind},
    )


def reach(rope: Rope, max_positions: int) -> int:
    """The longest sequence, in tokens, of a model with `max_positions`: yarn may stretch them."""
    scaling = rope.scaling
    if scaling is None or scaling["rope_type"] != "yarn":
        return max_positions
    return max(max_positions, int(scaling["factor"] * scaling[_ORIGINAL_CONTEXT]))


def _is_positive(value: Any) -> bool:
    return type(value) in (int, float) and value > 0  # a bool is no number
