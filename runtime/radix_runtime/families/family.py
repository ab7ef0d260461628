"""Family: how the checkpoints of some architectures are read."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from ..errors import ConfigError
from ..specs import ModelSpec
from .names import Rule

Keys = TypeVar("Keys", bound=msgspec.Struct)

# Keys of every file that change nothing here: who wrote it, training, generation, the tokenizer.
_IGNORED = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype",
    "embd_pdrop", "eos_token_id", "hidden_dropout", "initializer_range", "is_llama_config",
    "max_window_layers", "model_type", "output_router_logits", "pad_token_id", "pretraining_tp",
    "quantization_config", "resid_pdrop", "return_dict", "router_aux_loss_coef",
    "router_jitter_noise", "torch_dtype", "transformers.js_config", "transformers_version",
    "unsloth_fixed", "unsloth_version", "use_cache", "use_mrope",
})  # fmt: skip
# Keys of every configuration class of transformers 4, which it wrote into `text_config`: of
# generation, of classifiers, of encoders beside decoders.
_OF_EVERY_CLASS = frozenset({
    "add_cross_attention", "bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample",
    "early_stopping", "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty",
    "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "id2label", "is_decoder",
    "is_encoder_decoder", "label2id", "length_penalty", "max_length", "min_length",
    "no_repeat_ngram_size", "num_beam_groups", "num_beams", "num_return_sequences",
    "output_attentions", "output_hidden_states", "output_scores", "prefix", "problem_type",
    "pruned_heads", "remove_invalid_values", "repetition_penalty", "return_dict_in_generate",
    "sep_token_id", "suppress_tokens", "task_specific_params", "temperature", "tf_legacy_loss",
    "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torchscript", "typical_p",
    "use_bfloat16",
})  # fmt: skip
# Keys that change the result wherever they are not at rest.
_CHANGES_RESULTS = frozenset({
    "attention_multiplier", "attn_logit_softcapping", "clip_qkv", "embedding_multiplier",
    "final_logit_softcapping", "kv_lora_rank", "logit_scale", "logits_scaling",
    "n_routed_experts", "no_rope_layers", "num_experts", "num_local_experts", "qkv_bias",
    "query_pre_attn_scalar", "residual_multiplier", "rope_interleaved",
    "shared_expert_intermediate_size", "shared_intermediate_size", "use_bidirectional_attention",
    "use_qk_norm",
})  # fmt: skip


def _same_names(keys: Any) -> Sequence[Rule]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Generic[Keys]):
    """How the checkpoints of some architectures are read. Loads no torch.

    `keys`: the keys of config.json that the family understands, with their types and defaults.
    `read`: the model that they describe; raises ConfigError for what is not supported. `names`: the
    name rules of its checkpoints. `ignored`: further keys that change nothing."""

    keys: type[Keys]
    read: Callable[[Keys], ModelSpec]
    names: Callable[[Keys], Sequence[Rule]] = _same_names
    ignored: frozenset[str] = frozenset()

    def convert(self, raw: Mapping[str, Any]) -> Keys:
        """The family's keys of a config.json. Raises ConfigError, naming the key that is missing,
        has the wrong type or would change the result of a model of another family."""
        for key in sorted(_CHANGES_RESULTS & self.unknown_keys(raw)):
            raise ConfigError(
                f"config.json: {key} {raw[key]!r} is not supported for this architecture"
            )
        taking_null = {
            field.encode_name
            for field in msgspec.structs.fields(self.keys)
            if _takes_none(field.type)
        }
        given = {key: raw[key] for key in raw if raw[key] is not None or key in taking_null}
        try:
            return msgspec.convert(given, self.keys)
        except msgspec.ValidationError as error:
            raise ConfigError(f"config.json: {error}") from None

    def unknown_keys(self, raw: Mapping[str, Any]) -> set[str]:
        """The keys of a config.json that the family neither understands nor knows to change
        nothing. A null says nothing."""
        fields = self.keys.__struct_encode_fields__
        known = {*fields, *_IGNORED, *_OF_EVERY_CLASS, *self.ignored}
        return {
            key
            for key, value in raw.items()
            if key not in known
            and value is not None
            and not key.startswith("_")
            and not (key in _CHANGES_RESULTS and _is_at_rest(value))
        }


def _is_at_rest(value: Any) -> bool:
    """Whether a setting asks for nothing: false, 0, empty, or a factor of 1."""
    return not value or (value == 1 and value is not True)


def _takes_none(kind: Any) -> bool:
    found = msgspec.inspect.type_info(kind)
    types = found.types if isinstance(found, msgspec.inspect.UnionType) else (found,)
    return any(isinstance(each, msgspec.inspect.NoneType) for each in types)
