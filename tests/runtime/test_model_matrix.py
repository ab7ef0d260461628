"""The table of architectures in docs/models.md."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from radix_runtime.families import families, llama

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("model_matrix", ROOT / "tools/model_matrix.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_up_to_date(matrix: ModuleType) -> None:
    assert matrix.PAGE.read_text() == matrix.page(), "run python tools/model_matrix.py"


def test_an_architecture_that_no_test_compares_is_an_error(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(families._items, "NewForCausalLM", llama.LLAMA)
    with pytest.raises(LookupError, match="is a NewForCausalLM"):
        matrix.table()


def test_a_change_of_the_registry_changes_the_table(
    matrix: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = matrix.table()
    others = {name: item for name, item in families._items.items() if name != "LlamaForCausalLM"}
    monkeypatch.setattr(families, "_items", others)
    after = matrix.table()
    gone = set(before.splitlines()) - set(after.splitlines())
    assert len(gone) == 1 and "`LlamaForCausalLM`" in gone.pop()
