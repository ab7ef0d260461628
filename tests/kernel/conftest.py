"""Seeds, threads and the table of measured errors."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import radix_kernels as rk
from tests import covers
from tests.gcn import executed, library
from tests.kernel import combinations, gpu_wheels, helpers, on_device

if not torch.cuda.is_available():
    # Triton reads this when it is first imported, which may be in any test module.
    os.environ["TRITON_INTERPRET"] = "1"


TRITON_TARGETS = ("gfx942", "gfx950")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kernel-seed", type=int, default=None, help="repeat the inputs of a run")
    parser.addoption("--device", choices=on_device.DEVICES, default="cpu", help="where ops run")
    parser.addoption(
        "--triton",
        choices=TRITON_TARGETS,
        help="compile Triton's kernels for this AMD GPU and run them on tests/gcn's executor",
    )
    parser.addoption(
        "--reference",
        action="store_true",
        help="go on without a native library: ops run the reference",
    )
    parser.addoption(
        "--cover",
        metavar="SEED",
        help="of each test only some parameter sets, in which every value is (tests/covers.py)",
    )
    parser.addoption(
        "--executed", metavar="FILE", type=Path, help="write what the executor ran there, as JSON"
    )
    parser.addoption("--numerics", action="store_true", help="print the largest errors seen")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "combinations(name=values, ...): all of them, or a cover (combinations.py)"
    )
    target = config.getoption("--triton")
    if target:
        _run_triton_on_the_executor(target)
    device = config.getoption("--device")
    why = "" if target else on_device.no_library_for(device)
    if why and not config.getoption("--reference"):
        raise pytest.UsageError(
            f"no native kernel runs on {device} here, tests would be of the reference: {why}"
        )


def _run_triton_on_the_executor(target: str) -> None:
    """Before a test module imports Triton, which would interpret its kernels."""
    del os.environ["TRITON_INTERPRET"]
    os.environ["GCN_TARGET"] = target
    importlib.import_module("tests.gcn.triton_driver").install(target)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    combinations.parametrize(metafunc)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: bool(_wheels([item])))
    if seed := config.getoption("--cover"):
        sets = covers.by_test(items)
        kept = {item for name in sets for item in covers.cover(sets[name], 1, seed + name)}
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


def pytest_collection_finish(session: pytest.Session) -> None:
    if not session.config.option.collectonly:
        for backend in sorted(_wheels(session.items)):
            gpu_wheels.start(backend)


def _wheels(items: list[pytest.Item]) -> set[str]:
    """The GPU backends whose wheels these tests need; they run last and wait for the builds."""
    marks = [mark for item in items for mark in item.iter_markers("builds")]
    return {backend for mark in marks for backend in mark.args}


def pytest_sessionfinish() -> None:
    gpu_wheels.stop()


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    device = request.config.getoption("--device")
    if device != "cpu":
        if request.node.get_closest_marker("cpu_only"):
            pytest.skip("on the CPU only")
        on_device.patch(monkeypatch, device)


@pytest.fixture
def on_hopper(request: pytest.FixtureRequest) -> None:
    """For tests of what only that GPU has."""
    if request.config.getoption("--device") != "cuda":
        pytest.skip("wants --device cuda")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wants a Hopper GPU")


@pytest.fixture(autouse=True)
def _fallback_as_imported() -> Iterator[None]:
    """Whatever ran before: an engine of the runtime makes an op without a kernel an error."""
    before = rk.get_fallback()
    if before != "warn":
        rk.set_fallback("warn")
    yield
    if rk.get_fallback() != before:
        rk.set_fallback(before)


@pytest.fixture(autouse=True, scope="session")
def _one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """Fresh random numbers; the seed is in the captured output of a failing test."""
    given = request.config.getoption("--kernel-seed")
    seed = int.from_bytes(os.urandom(4), "little") if given is None else given
    print(f"inputs: --kernel-seed {seed}")
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def _seed_of_noise(rng: torch.Generator) -> None:
    """Every test has a seed, those that only build index tensors too."""


@pytest.fixture
def interpreter_widens_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter multiplies the bit patterns of bfloat16: widen them first (exact)."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    original = InterpreterBuilder.create_dot

    def widen(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        bits = x.data.astype(np.uint32) << 16
        return TensorHandle(bits.view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return original(self, widen(a), widen(b), *rest)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    if config.getoption("--device") == "rocm-sim" or config.getoption("--triton"):
        facts = library.report()
        rate = facts["instructions"] / max(facts["seconds"], 1e-9) / 1e6
        terminalreporter.section("executed machine code")
        terminalreporter.write_line(
            f"{facts['launches']} launches of {len(facts['kernels'])} kernels,"
            f" {facts['instructions']} wave instructions of {len(facts['executed'])} kinds,"
            f" {rate:.1f} million a second; not known: {len(facts['unknown'])}"
        )
        if path := config.getoption("--executed"):
            executed.write(path, "kernel of Triton" if config.getoption("--triton") else "op")
    if not config.getoption("--numerics"):
        return
    terminalreporter.section("largest errors against float64 (norm, worst element)")
    for (op, dtype), (norm, worst) in sorted(helpers.measured.items()):
        terminalreporter.write_line(f"| `{op}` | {dtype} | {norm:.1e} | {worst:.1e} |")
