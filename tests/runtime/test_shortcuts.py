"""Fast ways survive wrapping and subclassing, and never outlive what they are fast ways to."""

from __future__ import annotations

from collections import abc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from radix_runtime import ops
from radix_runtime.attention.base import AttentionBackend
from radix_runtime.attention.paged import PagedAttention
from radix_runtime.attention.registry import attention_backends
from radix_runtime.device import Device
from radix_runtime.model_config import ModelConfig
from radix_runtime.models.base import CausalLM
from radix_runtime.models.decoder import DecoderForCausalLM
from radix_runtime.models.loader import models
from radix_runtime.quantization.at_load import AtLoad
from radix_runtime.quantization.base import LinearMethod
from radix_runtime.quantization.dense import DenseMethod, Int8Method
from radix_runtime.quantization.params import Block, LinearShape, ParamSpec
from radix_runtime.quantization.registry import quantizations
from radix_runtime.shortcuts import reset_shortcuts
from tests.marks import needs_cpu_library
from tests.runtime.tiny_models import TINY, Driver, Sequence, random_ids, reference_model, save

torch.set_num_threads(1)
STEPS = (20, 11, 1, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(reference_model("llama"), tmp_path_factory.mktemp("llama"))


def use(registry: Any, name: str, item: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._items, name, item)


def run(driver: Driver) -> torch.Tensor:
    """Hidden states of a sequence in chunks, [sum(STEPS), hidden_size]."""
    sequence = Sequence(0, random_ids(driver.config, sum(STEPS), seed=1))
    outputs = []
    for count in STEPS:
        driver.batch.upload(driver.plan([(sequence, count)]))
        driver.batch.fill(driver.next_token, driver.committed_len)
        with torch.inference_mode():
            outputs.append(driver.model(driver.batch).clone())
    return torch.cat(outputs)


def is_fused(driver: Driver) -> bool:
    return bool(driver.model.model._cpu_decoder.applies_to(driver.pool))


def switch_off(driver: Driver) -> Driver:
    driver.model.model._cpu_decoder._is_possible = False
    return driver


def test_a_shortcut_is_reset_when_its_method_is_overridden_nearer() -> None:
    class Root:
        fast = "root"

        def __init_subclass__(cls) -> None:
            reset_shortcuts(cls, Root, "slow", ["fast"])

        def slow(self) -> str:
            return "root"

    class Both(Root):
        fast = "both"

        def slow(self) -> str:
            return "both"

    class Plain(Both):
        pass

    class Slower(Both):
        def slow(self) -> str:
            return "slower"

    class Faster(Slower):
        fast = "faster"

    class Mixin:
        def slow(self) -> str:
            return "mixin"

    class Mixed(Mixin, Both):
        pass

    found = {kind.__name__: kind.fast for kind in (Both, Plain, Slower, Faster, Mixed)}
    expected = {"Both": "both", "Plain": "both", "Slower": "root", "Faster": "faster"}
    assert found == {**expected, "Mixed": "root"}


class Doubled(DenseMethod):
    """Overrides the product and nothing else."""

    def apply(self, layer: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
        return super().apply(layer, x, **options).mul_(2)


class Wrapped(LinearMethod):
    """Counts, and hands everything on."""

    def __init__(self) -> None:
        self.inner = DenseMethod()
        self.products = 0

    def params(self, shape: LinearShape, dtype: torch.dtype) -> abc.Sequence[ParamSpec]:
        return self.inner.params(shape, dtype)

    def apply(self, layer: Any, x: torch.Tensor, **options: Any) -> torch.Tensor:
        self.products += 1
        return self.inner.apply(layer, x, **options)

    def packed_weight(self, layer: Any) -> ops.PackedWeight | None:
        return self.inner.packed_weight(layer)

    def finalize(self, layer: Any) -> None:
        self.inner.finalize(layer)


def every_layer(method: type[LinearMethod]) -> type[AtLoad]:
    """A format that holds layers, experts and the head by this method."""

    class Every(AtLoad):
        def linear(self) -> LinearMethod:
            return method()

        def head(self) -> LinearMethod:
            return method()

    return Every


class Layer(torch.nn.Module):
    """What a method uses of a layer."""

    weight: Any

    def hold(self, weight: Any) -> None:
        del self.weight
        self.weight = weight


def packed_layer(method: LinearMethod) -> Layer:
    layer = Layer()
    shape = LinearShape(name="x", inputs=Block.whole(8), parts={None: Block.whole(6)})
    (spec,) = method.params(shape, torch.float32)
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(spec.shape_on_rank(shape), generator=generator)
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    method.finalize(layer)
    return layer


@pytest.mark.parametrize(
    "method", [DenseMethod(), Int8Method(), Wrapped()], ids=lambda method: type(method).__name__
)
def test_argmax_is_that_of_the_outputs(method: LinearMethod) -> None:
    layer = packed_layer(method)
    x = torch.randn(5, 8)
    found = method.argmax(layer, x)
    assert found is not None and found.dtype == torch.int32
    assert torch.equal(found.long(), method.apply(layer, x).argmax(-1))


def test_a_method_that_overrides_the_product_loses_the_shortcuts() -> None:
    method = Doubled()
    x = torch.randn(5, 8)
    layer = packed_layer(method)
    assert method.argmax(layer, x) is None and method.packed_weight(layer) is None
    expected = ops.silu_and_mul(DenseMethod().apply(layer, x) * 2)
    assert torch.equal(method.apply_silu_and_mul(layer, x), expected)


@needs_cpu_library
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TINY)
def test_the_fused_decoder_gives_the_bits_of_the_modules(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    folder = save(reference_model(name), tmp_path)
    fused = Driver(folder, dtype=dtype)
    modules = switch_off(Driver(folder, dtype=dtype))
    assert is_fused(fused) and not is_fused(modules)
    assert torch.equal(run(fused), run(modules))


@needs_cpu_library
def test_a_wrapped_method_keeps_the_fast_ways(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(Driver(folder))
    use(quantizations, "dense", every_layer(Wrapped), monkeypatch)
    driver = Driver(folder)
    assert is_fused(driver)
    hidden = run(driver)
    assert torch.equal(hidden, expected)
    tokens = driver.model.greedy_tokens(hidden)
    assert tokens is not None
    assert driver.model.model.layers[0].mlp.down_proj.method.products == 0
    method = driver.model.head.method
    assert method.products == 0
    assert torch.equal(tokens.long(), driver.model.compute_logits(hidden).argmax(-1))
    assert method.products == 1


@needs_cpu_library
def test_a_method_that_overrides_the_product_is_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = run(Driver(folder))
    use(quantizations, "dense", every_layer(Doubled), monkeypatch)
    driver = Driver(folder)
    assert not is_fused(driver)
    found = run(driver)
    assert torch.equal(found, run(switch_off(Driver(folder)))) and not torch.equal(found, usual)


class Plain(DecoderForCausalLM):
    pass


class Shifted(DecoderForCausalLM):
    """Its best token is another one."""

    def compute_logits(
        self, hidden: torch.Tensor, out: torch.Tensor | None = None
    ) -> torch.Tensor | None:
        logits = super().compute_logits(hidden, out)
        return None if logits is None else logits.roll(1, -1)


class ShiftedToo(Shifted):
    """Knows its best token again."""

    def greedy_tokens(self, hidden: torch.Tensor) -> torch.Tensor | None:
        tokens = DecoderForCausalLM.greedy_tokens(self, hidden)
        return None if tokens is None else (tokens + 1) % self.head.vocab_size


@needs_cpu_library
@pytest.mark.parametrize(
    ("kind", "has_shortcut"),
    [(DecoderForCausalLM, True), (Plain, True), (Shifted, False), (ShiftedToo, True)],
)
def test_greedy_tokens_are_those_of_the_logits(
    kind: type[CausalLM], has_shortcut: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(models, "LlamaForCausalLM", kind, monkeypatch)
    driver = Driver(folder)
    hidden = run(driver)
    tokens = driver.model.greedy_tokens(hidden)
    logits = driver.model.compute_logits(hidden)
    assert logits is not None and (tokens is not None) == has_shortcut
    if tokens is not None:
        assert torch.equal(tokens.long(), logits.argmax(-1))


class Named(PagedAttention):
    pass


class Silent(PagedAttention):
    """Attends to nothing."""

    def forward(self, layer: Any, q: Any, batch: Any, out: torch.Tensor) -> torch.Tensor:
        return out.zero_()


class Around(AttentionBackend):
    """Hands everything on, the flag too."""

    def __init__(self, config: ModelConfig, device: Device) -> None:
        super().__init__(config, device)
        self.inner = PagedAttention(config, device)
        self.supports_fused_decoder = self.inner.supports_fused_decoder

    @classmethod
    def supports(cls, *args: Any) -> bool:
        return PagedAttention.supports(*args)

    def forward(self, layer: Any, q: Any, batch: Any, out: torch.Tensor) -> torch.Tensor:
        return self.inner.forward(layer, q, batch, out)


@needs_cpu_library
@pytest.mark.parametrize(("kind", "fused"), [(Named, True), (Silent, False), (Around, True)])
def test_a_backend_says_whether_it_may_be_fused(
    kind: type[AttentionBackend], fused: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = run(Driver(folder))
    use(attention_backends, "mine", kind, monkeypatch)
    driver = Driver(folder, backend="mine")
    assert is_fused(driver) == fused
    assert torch.equal(run(driver), usual) == fused


def zeroed(base: type[torch.nn.Module]) -> type[torch.nn.Module]:
    """A subclass whose forward gives zeros."""

    class Zeroed(base):  # type: ignore[misc, valid-type]
        def forward(self, *given: Any, **options: Any) -> torch.Tensor:
            return super().forward(*given, **options).mul(0)

    return Zeroed


MODULES: dict[str, Callable[[Any], torch.nn.Module]] = {
    "layer": lambda model: model.layers[1],
    "attention": lambda model: model.layers[1].self_attn,
    "mlp": lambda model: model.layers[1].mlp,
    "norm of a layer": lambda model: model.layers[1].post_attention_layernorm,
    "projection": lambda model: model.layers[1].self_attn.qkv_proj,
    "last norm": lambda model: model.norm,
}


@needs_cpu_library
@pytest.mark.parametrize("which", MODULES)
def test_a_module_with_a_forward_of_its_own_is_not_fused(which: str, folder: Path) -> None:
    driver = Driver(folder)
    module = MODULES[which](driver.model.model)
    module.__class__ = zeroed(type(module))
    assert not is_fused(driver)
    assert not torch.equal(run(driver), run(Driver(folder)))


@needs_cpu_library
@pytest.mark.parametrize("name", ["self_attn", "mlp", "input_layernorm"])
def test_modules_of_another_kind_are_not_fused(name: str, folder: Path) -> None:
    """They need not have the attributes of ours."""
    driver = Driver(folder)
    setattr(driver.model.model.layers[0], name, torch.nn.Identity())
    assert not is_fused(driver)


CHANGES: dict[str, Callable[[Any], None]] = {
    "activation": lambda model: setattr(model.layers[1].mlp, "activation", "gelu"),
    "eps of a layer": lambda model: setattr(model.layers[2].input_layernorm, "eps", 1e-3),
    "eps of the last norm": lambda model: setattr(model.norm, "eps", 1e-3),
}


@needs_cpu_library
@pytest.mark.parametrize("which", CHANGES)
def test_settings_may_differ_by_layer(which: str, folder: Path) -> None:
    """Each layer has its own records: the bits of the modules with the same change."""
    fused = Driver(folder)
    modules = switch_off(Driver(folder))
    for driver in (fused, modules):
        CHANGES[which](driver.model.model)
    assert is_fused(fused) and not is_fused(modules)
    found = run(fused)
    assert torch.equal(found, run(modules))
    assert not torch.equal(found, run(Driver(folder)))


@needs_cpu_library
def test_a_cache_of_another_type_is_not_fused(folder: Path) -> None:
    assert not is_fused(Driver(folder, kv_dtype=torch.bfloat16))
