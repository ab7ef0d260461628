"""tools/ci_tests.py, over stages of real tests in a Makefile of their own."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[1] / "tools" / "ci_tests.py"
# As the repository's, with tests that need nothing installed.
MAKEFILE = """
TESTS ?= test_one.py
report = --junitxml=$(JUNIT)/$@.xml -o junit_family=xunit1
PYTEST = {python} -m pytest -q -p no:cacheprovider --rootdir=. $(report)
first second: ; $(PYTEST) $(TESTS) || case $$? in 1|5) ;; *) exit 1 ;; esac
other: ; $(PYTEST) $(OTHERS) || case $$? in 1|5) ;; *) exit 1 ;; esac
broken: ; exit 3
"""
# A test that fails as often as its file of failures has bytes left.
TESTS = """
import pathlib
import pytest

def fails(name):
    file = pathlib.Path(name)
    left = file.read_text() if file.exists() else ""
    file.write_text(left[1:])
    return bool(left)

@pytest.mark.parametrize("text", ["a", "b [c]::d $e 'f' \\"g\\"", "ä"])
def test_plain(text):
    assert not fails(f"plain-{text[0]}")

class TestGroup:
    def test_method(self):
        assert not fails("method")

@pytest.fixture
def resource():
    yield
    assert not fails("teardown"), "the teardown has failed"

def test_with_teardown(resource):
    pass

@pytest.mark.skipif(True, reason="never")
def test_skipped():
    pass

@pytest.mark.parametrize("number", range(6))
def test_many(number):
    assert not fails("many"), "one of many"
"""


def load_script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("ci_tests", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


ci_tests = load_script()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The script's repository."""
    (tmp_path / "Makefile").write_text(MAKEFILE.replace("{python}", sys.executable))
    (tmp_path / "test_one.py").write_text(TESTS)
    monkeypatch.setattr(ci_tests, "ROOT", tmp_path)
    monkeypatch.setattr(ci_tests, "REPORTS", tmp_path / "reports")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take most of the time
    # Of a make and of a pytest that run this test.
    for name in ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "JUNIT", "TESTS", "PYTEST_ADDOPTS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def test_all_pass(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert ci_tests.main(["first", "second"]) == 0
    printed = capfd.readouterr().out
    assert "== first: 0 min" in printed and "== second: 0 min" in printed
    assert "FLAKY" not in printed and "FAILED" not in printed


FLAKY = {
    "plain-a": "test_one.py::test_plain[a]",
    "plain-b": "test_one.py::test_plain[b [c]::d $e 'f' \"g\"]",
    "plain-ä": "test_one.py::test_plain[\\xe4]",
    "method": "test_one.py::TestGroup::test_method",
    "teardown": "test_one.py::test_with_teardown",
}


def test_what_passes_the_second_time_is_flaky(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for file in FLAKY:
        (folder / file).write_text("x")
    assert ci_tests.main(["first", "second"]) == 0
    printed = capfd.readouterr().out
    assert "5 FLAKY tests to mend" in printed
    for node in FLAKY.values():
        _, _, report = printed.partition(f"FLAKY: {node} failed in first and passed when")
        assert "assert not fails(" in report[: report.index("=" * 100)]
    # Only those ran again.
    again = ci_tests.read_report(folder / "reports/again/first.xml")
    assert {(outcome.node, outcome.status) for outcome in again} == {
        (node, "passed") for node in FLAKY.values()
    }


def test_one_that_fails_twice_fails_the_run(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "method").write_text("xx")
    (folder / "plain-a").write_text("x")
    assert ci_tests.main(["first"]) == 1
    printed = capfd.readouterr().out
    assert "FAILED twice: test_one.py::TestGroup::test_method" in printed
    assert "FLAKY: test_one.py::test_plain[a]" in printed


def test_every_stage_runs_whatever_failed_before(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ci_tests.SELECTION, "other", "OTHERS")
    monkeypatch.setenv("OTHERS", "test_two.py")
    (folder / "test_two.py").write_text("def test_never():\n    assert not 1\n")
    (folder / "plain-a").write_text("x")
    assert ci_tests.main(["first", "other", "second"]) == 1
    printed = capfd.readouterr().out
    assert "== second:" in printed
    assert "FLAKY: test_one.py::test_plain[a]" in printed
    assert "FAILED twice: test_two.py::test_never" in printed


def test_too_many_get_no_second_chance(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (folder / "many").write_text("x" * 6)
    assert ci_tests.main(["first"]) == 1
    printed = capfd.readouterr().out
    assert "6 tests failed" in printed and "test_one.py::test_many[5]" in printed
    assert not (folder / "reports/again").exists()
    (folder / "many").write_text("x" * 5)
    assert ci_tests.main(["first"]) == 0
    assert "5 FLAKY tests to mend" in capfd.readouterr().out


@pytest.mark.parametrize(
    ("tests", "stages", "message"),
    [
        ("test_one.py", ["first", "broken"], "make broken ended with status 2"),
        ("absent.py", ["first"], "make first ended with status 2"),
        ("syntax.py", ["first"], "make first ended with status 2"),
        ("exits.py", ["first"], "make first has run no test"),
        ("empty.py", ["first"], "make first has run no test"),
    ],
)
def test_a_stage_that_does_not_run_to_its_end_fails(
    folder: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tests: str,
    stages: list[str],
    message: str,
) -> None:
    """Whatever the tests before it did, and though none failed."""
    (folder / "empty.py").write_text("")
    (folder / "syntax.py").write_text("def test_it(:\n")
    (folder / "exits.py").write_text("import os\ndef test_it():\n    os._exit(1)\n")
    monkeypatch.setenv("TESTS", tests)
    assert ci_tests.main(stages) == 1
    assert message in capfd.readouterr().out


def test_a_test_that_is_gone_when_it_runs_again_has_not_passed(folder: Path) -> None:
    """The pytest that finds nothing to run does not fail."""
    failure = ci_tests.Failure(stage="first", node="test_one.py::test_skipped", report="")
    assert ci_tests.run_again("first", [failure], folder / "again") == [failure]


def test_without_stages_it_says_what_it_does(capfd: pytest.CaptureFixture[str]) -> None:
    assert ci_tests.main([]) == 2
    assert "Runs stages of tests" in capfd.readouterr().out
