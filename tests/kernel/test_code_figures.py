"""tools/code_figures.py counts what it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools/code_figures.py"
SOURCE = '''
"""A module."""

# a comment alone
import os  # beside code it counts


class Row:
    def total(self, *given):
        """Documented."""
        a, b = given[0], 2
        x, y, z = 1, 2, 3
        return max(*given) if given else [v for v in (a, b)]

    def _hidden(self):
        def inside():
            return os

        return inside


async def find(rows):
    for row in rows:
        if (length := len(row)) > 3 and row:
            return length
    return {LONG}
'''.replace("{LONG}", '"' + "x" * 100 + '"')

pytestmark = pytest.mark.cpu_only


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("code_figures", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_counts(tool):
    figures = tool.Figures()
    figures.add(SOURCE)
    assert len(figures.line_lengths) == 17
    assert figures.line_lengths[0] == len('"""A module."""')
    assert [length for length in figures.line_lengths if length > 100] == [113]
    assert (figures.walrus, figures.comprehensions, figures.ternaries) == (1, 1, 1)
    assert (figures.packed, figures.packed_three, figures.starred_calls) == (2, 1, 1)
    assert sorted(figures.function_lengths) == [2, 5, 5, 5]
    assert (figures.documented, figures.public, figures.complex_functions) == (1, 2, 0)


def test_a_function_of_many_branches(tool):
    branches = "".join(f"    if x == {i}:\n        return {i}\n" for i in range(10))
    figures = tool.Figures()
    figures.add(f"def f(x):\n{branches}")
    assert figures.complex_functions == 1
    figures.add(f"def f(x):\n{branches.replace('if x == 9', 'with x')}")
    assert figures.complex_functions == 1


def test_a_table_has_a_column_for_each_path(tool, tmp_path, capsys):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/one.py").write_text("x = 1\n")
    (tmp_path / "package/two.py").write_text("x = 12345\n\n")
    single = tmp_path / "package/one.py"
    assert tool.main([str(tmp_path / "package"), str(single)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"| | {tmp_path / 'package'} | {single} |"
    assert "| code lines | 2 | 1 |" in lines
    assert "| characters of a code line | 7.0 | 5.0 |" in lines


def test_a_path_without_python_is_an_error(tool, tmp_path, capsys):
    assert tool.main([str(tmp_path)]) == 1
    assert "no Python in" in capsys.readouterr().err
