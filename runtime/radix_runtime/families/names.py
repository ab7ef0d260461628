"""Name rules: from the tensors of a checkpoint to those that the model's layers ask for.

A rule takes one (name, tensor) to any number of them. Patterns are regular expressions that are
searched for in the name. The names of the layers are those of Llama's checkpoints, with two more
for norms of a block's output, as GLM-4 has them:

    model.embed_tokens   model.norm   lm_head
    model.layers.N.input_layernorm             .post_attention_layernorm
    model.layers.N.post_self_attn_layernorm    .post_mlp_layernorm
    model.layers.N.self_attn.{q_proj,k_proj,v_proj,o_proj,q_norm,k_norm,sinks}
    model.layers.N.self_attn.{q_a_proj,q_a_layernorm,q_b_proj,kv_a_proj_with_mqa,kv_a_layernorm,
                              kv_b_proj}
    model.layers.N.mlp.{gate_proj,up_proj,down_proj}
    model.layers.N.mlp.{gate,experts.E.{gate_proj,...},shared_expert.{gate_proj,...},
                        shared_expert_gate}"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from .tensor_views import EverySecondRow, Item, Rows, TensorSource, Transposed

Named = tuple[str, TensorSource]

_OF_INPUTS = ".g_idx"  # GPTQ's tensor of the inputs alone


class Rule(Protocol):
    """A step from a checkpoint's tensors to the model's."""

    def apply(self, name: str, source: TensorSource) -> Iterator[Named]:
        """What becomes of a tensor; itself, where the rule is not about it. Raises ValueError on an
        unexpected shape."""
        ...


@dataclass(frozen=True, slots=True)
class Rename:
    """Every match of `pattern` becomes `replacement`, as in re.sub."""

    pattern: str
    replacement: str

    def apply(self, name: str, source: TensorSource) -> Iterator[Named]:
        """Rule.apply."""
        yield re.sub(self.pattern, self.replacement, name), source


@dataclass(frozen=True, slots=True)
class Drop:
    """A tensor that is no part of the model."""

    pattern: str

    def apply(self, name: str, source: TensorSource) -> Iterator[Named]:
        """Rule.apply."""
        if re.search(self.pattern, name) is None:
            yield name, source


def drop_layers(first: int, count: int) -> Drop:
    """Layers from `first` on, behind the model's last: they draft tokens, and are not run."""
    numbers = "|".join(str(first + i) for i in range(count))
    return Drop(rf"^model\.layers\.({numbers})\.")


@dataclass(frozen=True, slots=True)
class SplitRows:
    """One tensor whose rows are those of several: `parts` are the replacements of `pattern` for
    each, in the order of the rows, and their numbers of rows. What is about all rows, one scale or
    the order of the inputs, goes to each part; of what is about blocks of rows, each part gets that
    of its blocks."""

    pattern: str
    parts: tuple[tuple[str, int], ...]

    def apply(self, name: str, source: TensorSource) -> Iterator[Named]:
        """Rule.apply."""
        if re.search(self.pattern, name) is None:
            yield name, source
            return
        shape = source.get_shape()
        is_shared = shape in ([], [1]) or name.endswith(_OF_INPUTS)
        per = 1 if is_shared else self._rows_of_an_element(shape)
        first = 0
        for replacement, count in self.parts:
            rows = source if is_shared else Rows(source, first=first // per, count=count // per)
            yield re.sub(self.pattern, replacement, name), rows
            first += count

    def _rows_of_an_element(self, shape: list[int]) -> int:
        """1, or the size of the blocks of rows that the tensor's rows stand for."""
        expected = sum(count for _, count in self.parts)
        per = -(-expected // max(1, shape[0]))
        is_whole = all(count % per == 0 for _, count in self.parts)
        if per * shape[0] != expected or not is_whole:
            raise ValueError(f"has shape {shape}, expected {expected} rows")
        return per


@dataclass(frozen=True, slots=True)
class Deinterleave:
    """One tensor whose rows are those of two in turn: `even` and `odd` are the replacements of
    `pattern`."""

    pattern: str
    even: str
    odd: str

    def apply(self, name: str, source: TensorSource) -> Iterator[Named]:
        """Rule.apply."""
        if re.search(self.pattern, name) is None:
            yield name, source
            return
        if source.get_shape()[0] % 2:
            raise ValueError(f"has shape {source.get_shape()}, expected an even number of rows")
        yield re.sub(self.pattern, self.even, name), EverySecondRow(source, first=0)
        yield re.sub(self.pattern, self.odd, name), EverySecondRow(source, first=1)


@dataclass(frozen=True, slots=True)
class Unstack:
    """One tensor that holds those of all experts: `replacement` takes the place of `pattern`, with
    {} for the number of the expert."""

    pattern: str
    replacement: str

    def apply(self, name: str, source: TensorSource) -> Iterator[Named]:
        """Rule.apply."""
        if re.search(self.pattern, name) is None:
            yield name, source
            return
        for index in range(source.get_shape()[0]):
            replacement = self.replacement.format(index)
            yield re.sub(self.pattern, replacement, name), Item(source, index=index)


@dataclass(frozen=True, slots=True)
class Transpose:
    """A tensor with its last two dimensions the other way round. `rows`: how many it is to have; a
    tensor of another writer that has them already, and no square, stays as it is."""

    pattern: str
    rows: int | None = None

    def apply(self, name: str, source: TensorSource) -> Iterator[Named]:
        """Rule.apply."""
        if re.search(self.pattern, name) is None or self._is_right(source.get_shape()):
            yield name, source
        else:
            yield name, Transposed(source)

    def _is_right(self, shape: list[int]) -> bool:
        return self.rows == shape[-2] and self.rows != shape[-1]


def apply_rules(
    rules: Sequence[Rule], tensors: Iterable[Named], fail: Callable[[str, ValueError], Exception]
) -> Iterator[Named]:
    """The tensors after all rules, in their order. `fail(name, error)`: what to raise where a rule
    finds another shape than it expects."""
    for name, source in tensors:
        found: list[Named] = [(name, source)]
        for rule in rules:
            try:
                found = [item for each in found for item in rule.apply(*each)]
            except ValueError as error:
                raise fail(name, error) from None
        yield from found
