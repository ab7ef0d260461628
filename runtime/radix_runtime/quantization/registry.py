"""Weight formats by name (`--quantization`); other packages add theirs: "radix.quantization"."""

from ..registry import Registry
from .base import LinearMethod
from .dense import DenseMethod, Int4Method, Int8Method

linear_methods: Registry[type[LinearMethod]] = Registry(
    kind="quantization",
    group="radix.quantization",
    items={"dense": DenseMethod, "int8": Int8Method, "int4": Int4Method},
)
