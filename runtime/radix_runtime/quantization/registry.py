"""Weight formats by name: `--quantization`, and `quant_method` of a checkpoint. Other packages add
theirs: "radix.quantization"."""

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from ..registry import Registry
from .at_load import Int4AtLoad, Int8AtLoad
from .awq import AwqConfig
from .compressed_tensors import CompressedTensorsConfig
from .config import QuantizationConfig, Target, Unquantized
from .fp8_config import Fp8Config
from .gguf import GgufConfig
from .gptq import GptqConfig
from .mxfp4 import Mxfp4Config

quantizations: Registry[type[QuantizationConfig]] = Registry(
    kind="quantization",
    group="radix.quantization",
    items={
        "dense": Unquantized,
        "int8": Int8AtLoad,
        "int4": Int4AtLoad,
        "fp8": Fp8Config,
        "awq": AwqConfig,
        "gptq": GptqConfig,
        "compressed-tensors": CompressedTensorsConfig,
        "gguf": GgufConfig,
        "mxfp4": Mxfp4Config,
    },
)


def quantization_of(
    name: str | None, checkpoint: Mapping[str, Any] | None, target: Target
) -> QuantizationConfig:
    """The format of a model's weights: `checkpoint`, the `quantization_config` of its files, or
    else `name`, that of `--quantization`. Raises ConfigError."""
    if checkpoint is None:
        return quantizations.get(name or "dense").at_load(name or "dense", target)
    method = str(checkpoint.get("quant_method"))
    if name not in (None, method):
        raise ConfigError(f"--quantization {name}: the checkpoint is quantized already ({method})")
    return quantizations.get(method).from_checkpoint(checkpoint, target)
