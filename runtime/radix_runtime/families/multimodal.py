"""Checkpoints of multimodal models, of which only the text is served."""

from collections.abc import Sequence
from typing import Any

from .names import Drop, Rename, Rule

_OTHERS = "visual|vision_tower|vision_model|vision_embed_tokens|multi_modal_projector|audio_tower"


# Keys of files that do not put those about text into a `text_config`.
OTHER_KEYS = frozenset({
    "image_token_id", "video_token_id", "vision_config", "vision_end_token_id",
    "vision_start_token_id", "vision_token_id",
})  # fmt: skip


def text_rules(keys: Any) -> Sequence[Rule]:
    """The language model's tensors under the names of a model of its own; all others are dropped.
    It stands in `language_model`, with or without a `model` before or behind."""
    return (
        Drop(rf"^(model\.)?({_OTHERS})\."),
        Rename(r"^model\.language_model\.", "model."),
        Rename(r"^language_model\.(model|lm_head)\.", r"\1."),
    )
