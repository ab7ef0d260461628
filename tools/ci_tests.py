"""Runs stages of tests (targets of the Makefile) one after the other, for CI.

    tools/ci_tests.py test-parallel test-serial ...

Every stage runs, whatever failed before it. At the end the tests that failed run once more, each
stage's by themselves in one process. One that passes then is FLAKY: it is printed loudly with the
report of its first failure, and does not end the run. A flaky test is a bug to mend; the second
chance is there because one failure of ten thousand tests would otherwise hide what all the others
say. More than MOST failures get none: the run fails.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REPORTS = ROOT / "build/test-reports"
MOST = 5  # failures of all stages together that get a second chance
# The Makefile's variable that names the tests of a stage, where it is not TESTS.
SELECTION = {
    "test-old-torch": "OLD_TESTS",
    "test-rocm": "ROCM_TESTS",
    "test-rocm-gfx950": "ROCM_TESTS",
    "test-rocm-gfx90a": "ROCM_TESTS",
    "test-rocm-triton-gfx942": "TRITON_TESTS",
    "test-rocm-triton-gfx950": "TRITON_TESTS",
}


@dataclass(frozen=True)
class Outcome:
    """What became of one test: `status` is passed, failed or skipped, `report` the failure's text.
    `node` is the id that pytest takes."""

    node: str
    status: str
    report: str = ""


@dataclass(frozen=True)
class Failure:
    """A test that failed in a stage."""

    stage: str
    node: str
    report: str


class StageBroken(Exception):
    """A stage has not run to its end: a build, the collection or pytest itself failed."""


def read_report(path: Path) -> list[Outcome]:
    """The outcomes in a JUnit file of pytest's family xunit1."""
    return [_outcome(case) for case in ElementTree.parse(path).iter("testcase")]


def _outcome(case: ElementTree.Element) -> Outcome:
    node = _node(case)
    # A test may have two: it failed, and so did its teardown.
    problems = [*case.findall("failure"), *case.findall("error")]
    if problems:
        return Outcome(node=node, status="failed", report=_text(problems))
    status = "skipped" if case.find("skipped") is not None else "passed"
    return Outcome(node=node, status=status)


def _text(problems: Sequence[ElementTree.Element]) -> str:
    return "\n".join(each.text or each.get("message") or "" for each in problems)


def _node(case: ElementTree.Element) -> str:
    """`tests/a/test_b.py::TestC::test_d[e]`. Where a module could not be collected there is no
    file, and the name is the module's."""
    file = case.get("file")
    name = case.get("name", "")
    if file is None:
        return f"{case.get('classname', '')} {name}".strip()
    module = file.removesuffix(".py").replace("/", ".")
    classes = case.get("classname", "").removeprefix(module).strip(".")
    return "::".join([file, *filter(None, classes.split(".")), name])


def run_stage(stage: str, reports: Path) -> list[Failure]:
    """The tests of this stage that failed."""
    code, outcomes = _make(stage, reports)
    # Failures of tests alone do not end make (see there): this was the build, or pytest itself.
    if code:
        raise StageBroken(f"make {stage} ended with status {code}")
    if not outcomes:
        raise StageBroken(f"make {stage} has run no test")
    return [
        Failure(stage=stage, node=outcome.node, report=outcome.report)
        for outcome in outcomes
        if outcome.status == "failed"
    ]


def run_again(stage: str, failures: Sequence[Failure], reports: Path) -> list[Failure]:
    """Those of one stage's failures that do not pass when they run once more."""
    reports.mkdir(parents=True, exist_ok=True)
    selection = reports / f"{stage}.txt"
    selection.write_text("".join(f"{failure.node}\n" for failure in failures))
    variable = SELECTION.get(stage, "TESTS")
    _, outcomes = _make(stage, reports, f"{variable}=@{selection}", "WORKERS=0")
    passed = {outcome.node for outcome in outcomes if outcome.status == "passed"}
    return [failure for failure in failures if failure.node not in passed]


def _make(stage: str, reports: Path, *settings: str) -> tuple[int, list[Outcome]]:
    """make's status, and the outcomes that pytest has written down."""
    reports.mkdir(parents=True, exist_ok=True)
    report = reports / f"{stage}.xml"
    report.unlink(missing_ok=True)
    command = ["make", stage, f"JUNIT={reports}", *settings]
    code = subprocess.run(command, cwd=ROOT).returncode
    return code, read_report(report) if report.exists() else []


def run_all(stages: Sequence[str], reports: Path) -> int:
    """The exit status: 0 where every test passed at last."""
    failures: list[Failure] = []
    for stage in stages:
        start = time.monotonic()
        failures += run_stage(stage, reports)
        minutes, seconds = divmod(round(time.monotonic() - start), 60)
        print(f"== {stage}: {minutes} min {seconds} s", flush=True)
    if len(failures) > MOST:
        print(f"{len(failures)} tests failed, more than get a second chance:")
        print(*(f"  {failure.node}" for failure in failures), sep="\n")
        return 1
    lasting: list[Failure] = []
    for stage in stages:
        if own := [failure for failure in failures if failure.stage == stage]:
            lasting += run_again(stage, own, reports / "again")
    flaky = [failure for failure in failures if failure not in lasting]
    _print_flaky(flaky)
    for failure in lasting:
        print(f"FAILED twice: {failure.node}")
    return 1 if lasting else 0


def _print_flaky(flaky: Sequence[Failure]) -> None:
    for failure in flaky:
        print("=" * 100)
        print(f"FLAKY: {failure.node} failed in {failure.stage} and passed when it ran again.")
        print("This is a bug. The first failure:\n")
        print(failure.report)
    if flaky:
        print("=" * 100)
        print(
            f"{len(flaky)} FLAKY tests to mend:", *(failure.node for failure in flaky), sep="\n  "
        )


def main(stages: Sequence[str]) -> int:
    if not stages:
        print(__doc__)
        return 2
    shutil.rmtree(REPORTS, ignore_errors=True)
    try:
        return run_all(stages, REPORTS)
    except StageBroken as error:
        print(error)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
