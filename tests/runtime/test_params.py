"""ParamSpec: what ranks hold of merged tensors, against slices taken by hand."""

from __future__ import annotations

import pytest
import torch

from radix_runtime.errors import ConfigError
from radix_runtime.quantization.names import NameList
from radix_runtime.quantization.params import (
    Block,
    Dim,
    EachPart,
    Fixed,
    Inputs,
    LinearShape,
    Outputs,
    ParamSpec,
)
from tests.runtime.test_layers import Source

TOTALS = {"q_proj": 96, "k_proj": 24}
INPUTS = 96


def shape(rank: int, ranks: int, *, cut_inputs: bool = False) -> LinearShape:
    inputs = Block.share(INPUTS, rank, ranks) if cut_inputs else Block.whole(INPUTS)
    parts = {
        part: Block.whole(total) if cut_inputs else Block.share(total, rank, ranks)
        for part, total in TOTALS.items()
    }
    return LinearShape(name="layer", inputs=inputs, parts=parts)


def loaded(spec: ParamSpec, where: LinearShape, files: dict[str, torch.Tensor]) -> torch.Tensor:
    param = torch.full(spec.shape_on_rank(where), -7, dtype=spec.dtype)
    for part in spec.parts_of(where):
        assert part is not None
        spec.load_part(where, param, Source(files[part]), part)
    return param


def spec_of(*dims: Dim, **options: object) -> ParamSpec:
    return ParamSpec(name="x", dims=dims, dtype=torch.float32, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("cut_inputs", [False, True])
@pytest.mark.parametrize("per_output", [1, 8, 32])
@pytest.mark.parametrize("per_input", [1, 5, 16])
def test_units_that_a_rank_touches(
    ranks: int, cut_inputs: bool, per_output: int, per_input: int
) -> None:
    """Each output and input finds its unit where the rank's blocks say that it is."""
    spec = spec_of(Outputs(per_output), Inputs(per_input))
    files = {
        part: torch.randn(-(-total // per_output), -(-INPUTS // per_input))
        for part, total in TOTALS.items()
    }
    for rank in range(ranks):
        where = shape(rank, ranks, cut_inputs=cut_inputs)
        param = loaded(spec, where, files)
        inputs = where.inputs
        before = 0
        for part, block in where.parts.items():
            assert part is not None
            units = block.units(per_output)
            columns = inputs.units(per_input)
            for output in range(block.first, block.first + block.size):
                for column in range(inputs.first, inputs.first + inputs.size):
                    row = before + output // per_output - units.first
                    found = param[row, column // per_input - columns.first]
                    assert found == files[part][output // per_output, column // per_input]
            before += units.size
        assert param.shape[0] == before


def test_inputs_first_and_several_elements_for_a_unit() -> None:
    """18 bytes for each 32 inputs: of the second half of 128 inputs, bytes 36 to 72."""
    where = LinearShape(
        name="x", inputs=Block(total=128, first=64, size=64), parts={None: Block.whole(3)}
    )
    file = torch.randn(72, 3)
    spec = spec_of(Inputs(32, width=18), Outputs())
    param = torch.empty(spec.shape_on_rank(where))
    spec.load_part(where, param, Source(file), None)
    assert torch.equal(param, file[36:])


def test_what_lies_past_the_end_is_zero() -> None:
    """A vocabulary of 10 on three ranks of 4."""
    file = torch.randn(10, 5)
    rows = []
    for rank in range(3):
        where = LinearShape(
            name="x",
            inputs=Block.whole(5),
            parts={None: Block(total=10, first=4 * rank, size=4)},
        )
        spec = spec_of(Outputs(), Inputs())
        param = torch.full(spec.shape_on_rank(where), float("nan"))
        spec.load_part(where, param, Source(file), None)
        rows.append(param)
    assert torch.equal(torch.cat(rows)[:10], file) and not torch.cat(rows)[10:].any()


@pytest.mark.parametrize("scale_shape", [[], [1]])
def test_a_scale_for_each_part(scale_shape: list[int]) -> None:
    where = shape(0, 2)
    files = {"q_proj": torch.full(scale_shape, 2.0), "k_proj": torch.full(scale_shape, 3.0)}
    assert loaded(spec_of(EachPart()), where, files).tolist() == [2, 3]
    orders = {part: torch.randn(INPUTS) for part in TOTALS}
    rows = loaded(spec_of(EachPart(), Inputs()), where, orders)
    assert torch.equal(rows, torch.stack(list(orders.values())))


def test_a_parameter_of_some_parts() -> None:
    """As where parts are of different types."""
    files = {part: torch.randn(total, 1) for part, total in TOTALS.items()}
    spec = spec_of(Outputs(), Fixed(1), parts=("k_proj",), suffix="weight")
    assert torch.equal(loaded(spec, shape(1, 2), files), files["k_proj"][12:])


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (torch.zeros(96, 97), r"has shape \[96, 97\], expected \[96, 96\]"),
        (torch.zeros(96), r"has shape \[96\], expected \[96, 96\]"),
        (torch.zeros(()), r"has shape \[\], expected \[96, 96\]"),
        (torch.zeros(96, 96, dtype=torch.int32), "holds int32, expected float32"),
        (torch.zeros(96, 96).to(torch.float8_e4m3fn), "holds float8_e4m3fn, expected float32"),
    ],
)
def test_what_does_not_fit(file: torch.Tensor, message: str) -> None:
    spec = spec_of(Outputs(), Inputs())
    where = shape(0, 2)
    with pytest.raises(ValueError, match=message):
        spec.load_part(where, torch.empty(60, 96), Source(file), "q_proj")


def test_codes_are_not_converted() -> None:
    spec = ParamSpec(name="x", dims=(Fixed(2),), dtype=torch.int32)
    where = shape(0, 1)
    with pytest.raises(ValueError, match="holds int64, expected int32"):
        spec.load_part(where, torch.empty(2, dtype=torch.int32), Source(torch.arange(2)), "q_proj")


@pytest.mark.parametrize(
    ("name", "entry", "expected"),
    [
        ("lm_head", "lm_head", True),
        ("model.layers.1.mlp.gate", "mlp.gate", True),
        ("model.layers.1.mlp.gate_proj", "mlp.gate", False),
        ("model.layers.11.mlp.up_proj", "model.layers.1", False),
        ("model.layers.1.mlp.up_proj", "model.layers.1", True),
        ("model.layers.1.mlp.up_proj", "model.layers.1.mlp.", True),
        ("model.layers.1.mlp.up_proj", "layers.*.mlp", True),
        ("model.layers.1.mlp.up_proj", "model.layers.*.self_attn", False),
        ("model.layers.1.mlp.up_proj", "model.layers.*.up", False),
        ("model.layers.1.mlp.up_proj", "re:.*mlp.*", True),
        ("model.layers.1.mlp.up_proj", "re:mlp", False),
    ],
)
def test_lists_of_layers(name: str, entry: str, expected: bool) -> None:
    assert (name in NameList([entry])) == expected
    assert (
        name in NameList(["another", entry, "model.layers.1.other", "re:x", "a.*.b"])
    ) == expected
    assert name not in NameList([])


def test_an_entry_that_is_no_regular_expression() -> None:
    with pytest.raises(ConfigError, match=r"'\(' is no regular expression"):
        NameList(["lm_head", "re:("])
