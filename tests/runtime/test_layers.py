"""Layers one by one: what each rank holds, and what the ranks give together."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from radix_runtime import ops
from radix_runtime.attention.torch_native import TorchNativeAttention
from radix_runtime.distributed import Communicator
from radix_runtime.layers.activation import gated_activations
from radix_runtime.layers.base import BuildContext, Layer
from radix_runtime.layers.embedding import VocabParallel
from radix_runtime.layers.linear import ColumnParallelLinear, QKVLinear, RowParallelLinear
from radix_runtime.layers.norm import HeadNormWeight, RMSNorm
from radix_runtime.layers.rotary import rotary_table
from radix_runtime.quantization.config import LayerKind, QuantizationConfig, Unquantized
from radix_runtime.specs import Rope

torch.set_num_threads(1)
ROOT = Path(__file__).parents[2]


class Rank(Communicator):
    """One of several ranks; a reduction gives back the rank's own part."""

    def __init__(self, rank: int = 0, world_size: int = 1) -> None:
        self.rank = rank
        self.world_size = world_size


def context(
    rank: int = 0,
    size: int = 1,
    positions: int = 64,
    quantization: QuantizationConfig | None = None,
    dtype: torch.dtype = torch.float32,
) -> BuildContext:
    return BuildContext(
        communicator=Rank(rank, size),
        backend=TorchNativeAttention.__new__(TorchNativeAttention),  # no layer here attends
        quantization=quantization or Unquantized(),
        dtype=dtype,
        device=torch.device("cpu"),
        max_positions=positions,
    )


class Source:
    """A tensor as a checkpoint gives it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._tensor[index]


def load(layer: Layer, name: str, tensors: dict[Any, torch.Tensor]) -> None:
    """What the loader does for one parameter, from poisoned memory."""
    assert set(layer.parts(name)) == set(tensors)
    param = getattr(layer, name)
    assert param.is_meta
    memory = torch.full(param.shape, float("nan"), dtype=param.dtype)
    setattr(layer, name, torch.nn.Parameter(memory, requires_grad=False))
    for part, tensor in tensors.items():
        layer.weight_loader(name, memory, Source(tensor), part)
    layer.finalize(name)


def close(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_column_parallel_merged(size: int) -> None:
    x = torch.randn(4, 5)
    gate = torch.randn(6, 5)
    gate_bias = torch.randn(6)
    up = torch.randn(12, 5)
    up_bias = torch.randn(12)
    outputs = []
    for rank in range(size):
        ctx = context(rank, size)
        outputs_of = {"gate_proj": 6, "up_proj": 12}
        layer = ColumnParallelLinear(ctx, in_features=5, outputs=outputs_of, bias=True)
        load(layer, "weight", {"up_proj": up, "gate_proj": gate})
        load(layer, "bias", {"gate_proj": gate_bias, "up_proj": up_bias})
        outputs.append(layer(x).split([6 // size, 12 // size], dim=-1))
    assert close(torch.cat([o[0] for o in outputs], -1), x @ gate.T + gate_bias)
    assert close(torch.cat([o[1] for o in outputs], -1), x @ up.T + up_bias)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_qkv(size: int, kv_heads: int) -> None:
    """Each query head must meet its own KV head on its rank."""
    heads = 4
    dim = 3
    x = torch.randn(2, 5)
    weights = {part: torch.randn((heads if part == "q_proj" else kv_heads) * dim, 5)
               for part in ("q_proj", "k_proj", "v_proj")}  # fmt: skip
    whole = {part: (x @ w.T).unflatten(-1, (-1, dim)) for part, w in weights.items()}
    for rank in range(size):
        layer = QKVLinear(
            context(rank, size),
            5,
            head_dim=dim,
            num_heads=heads,
            num_kv_heads=kv_heads,
            bias=False,
        )
        load(layer, "weight", weights)
        q, k, v = (p.unflatten(-1, (-1, dim)) for p in layer(x).split(layer.sizes, -1))
        assert (q.shape[1], k.shape[1]) == (layer.num_heads, layer.num_kv_heads)
        for local in range(layer.num_heads):
            head = rank * layer.num_heads + local
            assert close(q[:, local], whole["q_proj"][:, head])
            mine = local * layer.num_kv_heads // layer.num_heads
            its = head * kv_heads // heads
            assert close(k[:, mine], whole["k_proj"][:, its])
            assert close(v[:, mine], whole["v_proj"][:, its])


@pytest.mark.parametrize("size", [1, 2, 3])
def test_row_parallel_adds_bias_and_residual_once(size: int) -> None:
    w = torch.randn(4, 6)
    b = torch.randn(4)
    x = torch.randn(3, 6)
    residual = torch.randn(3, 4)
    total = torch.zeros(3, 4)
    for rank, part in enumerate(x.chunk(size, -1)):
        layer = RowParallelLinear(context(rank, size), in_features=6, out_features=4, bias=True)
        load(layer, "weight", {None: w})
        load(layer, "bias", {None: b})
        total += layer(part.contiguous(), residual.clone())
    assert close(total, x @ w.T + b + residual)


def test_shapes_are_checked() -> None:
    layer = RowParallelLinear(context(0, 2), in_features=6, out_features=4)
    with pytest.raises(ValueError, match=r"has shape \[4, 3\], expected \[4, 6\]"):
        layer.weight_loader("weight", torch.empty(4, 3), Source(torch.empty(4, 3)), None)
    qkv = QKVLinear(context(0, 2), 5, head_dim=3, num_heads=4, num_kv_heads=2, bias=False)
    with pytest.raises(ValueError, match=r"has shape \[12, 5\], expected \[6, 5\]"):
        qkv.weight_loader("weight", torch.empty(12, 5), Source(torch.empty(12, 5)), "k_proj")


@pytest.mark.parametrize("vocab", [1, 7, 8, 13])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [LayerKind.EMBEDDING, LayerKind.TIED_HEAD])
def test_vocab_parallel(vocab: int, size: int, kind: LayerKind) -> None:
    """Any vocabulary over any number of ranks, ranks without a row too."""
    w = torch.randn(vocab, 6)
    ids = torch.tensor([*range(vocab), 0, vocab - 1], dtype=torch.int32)
    hidden = torch.randn(3, 6)
    embedded = torch.zeros(len(ids), 6)
    logits = []
    for rank in range(size):
        layer = VocabParallel(context(rank, size), vocab_size=vocab, hidden_size=6, kind=kind)
        load(layer, "weight", {None: w})
        before = ids.clone()
        embedded += layer(ids)
        assert torch.equal(ids, before)
        # What a captured step gives: of the whole vocabulary, which a rank's part is not.
        logits.append(layer.logits(hidden, torch.full((3, vocab), float("nan"))))
    assert torch.equal(embedded, w[ids.long()])
    assert close(torch.cat(logits, -1)[:, :vocab], hidden @ w.T)


def test_rmsnorm() -> None:
    norm = RMSNorm(context(), 8, eps=1e-5)
    w = torch.randn(8)
    load(norm, "weight", {None: w})
    x = torch.randn(3, 8)

    def expected(y: torch.Tensor) -> torch.Tensor:
        return y / (y.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * w

    kept = x.clone()
    assert close(norm(x), expected(x)) and torch.equal(x, kept)


def test_a_head_norm_weight_is_float32_once_loaded() -> None:
    ctx = replace(context(), dtype=torch.bfloat16)
    norm = HeadNormWeight(ctx, 16)
    assert norm.weight.dtype == torch.bfloat16
    w = torch.randn(16).bfloat16()
    load(norm, "weight", {None: w})
    assert norm.weight.dtype == torch.float32 and torch.equal(norm.weight, w.float())


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("silu", torch.nn.functional.silu),
        ("gelu", torch.nn.functional.gelu),
        ("gelu_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ],
)
def test_gated_activation(name: str, function: Any) -> None:
    x = torch.randn(5, 14)
    assert close(gated_activations[name](x), function(x[:, :7]) * x[:, 7:])


@pytest.mark.parametrize("rotary_dim", [16, 8])
def test_rotary_rotates_slices(rotary_dim: int) -> None:
    """q, k and v are views of one tensor, as the attention layer has them: q turns in place, k on
    its way to the cache, the rest stays."""
    table = rotary_table(context(positions=100), Rope(theta=1e4, rotary_dim=rotary_dim))
    qkv = torch.randn(4, 5, 16)
    before = qkv.clone()
    positions = torch.tensor([0, 3, 99, 50], dtype=torch.int32)
    q, k, v = qkv.split([3, 1, 1], dim=1)
    caches = torch.full((2, 3, 2, 1, 16), torch.nan)
    slots = torch.tensor([5, 0, -1, 2])
    ops.fused_qk_norm_rope_store(q, k, v, None, None, table, positions, *caches, slots)
    half = rotary_dim // 2
    frequency = 1e4 ** (-torch.arange(half, dtype=torch.float64) * 2 / rotary_dim)
    angle = (positions[:, None].double() * frequency)[:, None]
    a = before[:, :4, :half].double()
    b = before[:, :4, half:rotary_dim].double()
    first = a * angle.cos() - b * angle.sin()
    second = b * angle.cos() + a * angle.sin()
    turned = torch.cat([first, second, before[:, :4, rotary_dim:].double()], -1)
    assert close(q.double(), turned[:, :3])
    assert torch.equal(qkv[:, 3:], before[:, 3:])
    keys, values = caches.flatten(1, 2)
    stored = slots >= 0
    assert close(keys[slots[stored]].double(), turned[stored, 3:])
    assert torch.equal(values[slots[stored]], v[stored])
    assert keys[[1, 3, 4]].isnan().all() and values[[1, 3, 4]].isnan().all()


def test_weights_are_packed_on_the_cpu() -> None:
    layer = RowParallelLinear(context(), in_features=5, out_features=7)
    w = torch.randn(7, 5)
    load(layer, "weight", {None: w})
    assert isinstance(layer.weight, ops.PackedWeight)
    assert not list(layer.parameters())


def test_one_sentence_when_the_wheel_is_missing(tmp_path: Path) -> None:
    # None in sys.modules: not to be found, even where it is installed.
    hidden = "import sys; sys.modules['radix_kernels'] = None\n"
    for text, message in (
        (None, "the radix-kernels wheel is not installed; run: pip install"),
        ("__version__ = '0.0.1'", "the installed radix-kernels wheel is 0.0.1, this runtime needs"),
        ("raise ImportError('two wheels at once')", "two wheels at once"),
    ):
        code = "import radix_runtime.ops"
        if text is None:
            code = hidden + code
        else:
            (tmp_path / "radix_kernels.py").write_text(text)
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONPATH": f"{tmp_path}:{ROOT / 'runtime'}", "PATH": "/usr/bin"},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        last = result.stderr.strip().splitlines()[-1]
        assert last.startswith("radix_runtime.errors.ConfigError: ") and message in last
