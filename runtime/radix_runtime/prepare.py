"""What is checked and fetched before a process starts or a weight is read. Loads no torch."""

from dataclasses import replace
from typing import NamedTuple

from .checkpoint import CheckpointSize, check_checkpoint
from .config import (
    ATTENTION_BACKENDS,
    CHECKPOINT_FORMATS,
    FORMER_BACKENDS,
    GRAMMAR_BACKENDS,
    QUANTIZATIONS,
    ServerArgs,
)
from .errors import ConfigError
from .hub import fetch_weights, lacks_weights, resolve_model_path
from .model_config import ModelConfig
from .registry import check_name
from .scheduler.policy import schedule_policies
from .text.answer_format import check_format_names
from .text.generation_config import load_generation_config


class Prepared(NamedTuple):
    """A model that can be loaded. `args` have local paths, so that no process looks at the network
    later, and the format of a quantized checkpoint as `quantization`; `size` is None for random
    weights, and for those that are not here yet."""

    args: ServerArgs
    config: ModelConfig
    size: CheckpointSize | None


def prepare_model(args: ServerArgs, *, fetch: bool = True) -> Prepared:
    """Checks settings and model, downloading what is missing: configuration first, so that a model
    that cannot be served costs no download of its weights, and with `fetch` the weights. Raises
    ConfigError."""
    _check_names(args)
    folder = resolve_model_path(
        args.model_path, revision=args.revision, download_dir=args.download_dir
    )
    config = ModelConfig.from_dir(folder, args.json_model_override_args)
    config.check_tp(args.tp_size)
    quantization = _quantization(args, config)
    generation = load_generation_config(folder)  # its ids of the end are needed in any case
    if args.sampling_defaults == "model":
        generation.sampling_defaults()
    tokenizer_path = args.tokenizer_path
    if tokenizer_path is not None:
        tokenizer_path = str(resolve_model_path(tokenizer_path, download_dir=args.download_dir))
    size = None
    has_files = args.load_format != "dummy"
    if has_files and fetch:
        fetch_weights(args.model_path, folder, download_dir=args.download_dir)
    if has_files and (fetch or not lacks_weights(args.model_path, folder)):
        size = check_checkpoint(folder)
        # Again, since the weights tell their type where the configuration does not.
        config = ModelConfig.from_dir(folder, args.json_model_override_args)
    local = replace(
        args,
        model_path=str(folder),
        quantization=quantization,
        tokenizer_path=tokenizer_path,
        revision=None,  # the folder is that of the revision
        download_dir=None,
    )
    return Prepared(args=local, config=config, size=size)


def _quantization(args: ServerArgs, config: ModelConfig) -> str | None:
    """The name of the format: that of the checkpoint, where it is quantized. Raises ConfigError."""
    if config.quantization is None:
        if args.quantization in CHECKPOINT_FORMATS:
            raise ConfigError(
                f"--quantization {args.quantization}: the checkpoint is not quantized, and this "
                "format is none that quantizes as it loads"
            )
        return args.quantization
    method = str(config.quantization.get("quant_method"))
    check_name("quant_method", "radix.quantization", QUANTIZATIONS, method)
    if args.quantization not in (None, method):
        raise ConfigError(
            f"--quantization {args.quantization}: the checkpoint is quantized already ({method})"
        )
    return method


def _check_names(args: ServerArgs) -> None:
    """Raises ConfigError for a name of something that nobody has registered."""
    schedule_policies.get(args.schedule_policy)
    check_name("grammar backend", "radix.grammar_backends", GRAMMAR_BACKENDS, args.grammar_backend)
    check_format_names(args)
    if args.attention_backend is not None:
        group = "radix.attention_backends"
        name = FORMER_BACKENDS.get(args.attention_backend, args.attention_backend)
        check_name("attention backend", group, ATTENTION_BACKENDS, name)
    if args.quantization is None:
        return
    check_name("quantization", "radix.quantization", QUANTIZATIONS, args.quantization)
