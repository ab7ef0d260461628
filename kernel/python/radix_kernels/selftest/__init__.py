"""Every op of this installation against its reference: `python -m radix_kernels.selftest`.

For a machine that nobody has tried yet: a few odd shapes of each op and dtype, outputs poisoned,
errors measured against float64. Needs torch, which the references are written in; the package
itself imports none.
"""

from __future__ import annotations

import importlib
import platform
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import radix_kernels as rk
from radix_kernels import _loader
from radix_kernels._ops import OPS

_FAMILIES = (
    "pointwise",
    "attention",
    "products",
    "quantization",
    "routing",
    "sampling",
    "step",
)


@dataclass
class Row:
    """An op with a dtype. ok: None where nothing ran, for the reason in `note`; otherwise `note`
    says what went wrong. worst: the error that is the largest part of its bound."""

    op: str
    dtype: str
    implementation: str
    cases: int = 0
    worst: float = 0.0
    bound: float = 0.0
    ok: bool | None = None
    note: str = ""


@dataclass
class Report:
    """What ran where. problem: why no native kernel can run here; '' where they can."""

    facts: dict[str, Any]
    problem: str
    rows: list[Row] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """True when something ran, all of it was right, and native kernels can run."""
        ran = [row for row in self.rows if row.ok is not None]
        return not self.problem and bool(ran) and all(row.ok for row in ran)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        about = {**self.facts, "problem": self.problem, "ok": self.ok}
        return {**about, "seconds": round(self.seconds, 1), "rows": [asdict(r) for r in self.rows]}


def run(
    device: str | None = None,
    *,
    ops: Sequence[str] | None = None,
    seed: int = 0,
    include_reference: bool = False,
) -> Report:
    """Runs the cases of all ops, or of `ops`, on a torch device (default: the library's).

    include_reference: also ops that have no kernel here, whose reference is then compared with its
    definition in float64. ModuleNotFoundError without torch, ValueError for an op that does not
    exist.
    """
    torch = _torch()
    known = {op.name for op in OPS}
    if unknown := sorted(set(ops or ()) - known):
        raise ValueError(f"selftest: there is no op {', '.join(unknown)}")
    for family in _FAMILIES:
        importlib.import_module(f"{__name__}.{family}")
    said = rk.capabilities()
    device = device or ("cpu" if said["backend"] in (None, "cpu") else "cuda")
    report = Report(facts=_facts(torch, said, device, seed), problem=said["problem"])
    if device == "cuda" and not report.problem and not torch.cuda.is_available():
        report.problem = f"torch {torch.__version__} sees no GPU"
    if report.problem and not include_reference:
        return report
    begin = time.monotonic()
    before = rk.get_fallback()
    rk.set_fallback("reference" if include_reference else "error")
    try:
        for name in ops or [op.name for op in OPS]:
            report.rows += _rows(torch, name, said["ops"][name], device, seed, include_reference)
    finally:
        rk.set_fallback(before)
    report.seconds = time.monotonic() - begin
    return report


def _rows(
    torch: Any,
    op: str,
    by_dtype: dict[str, dict[str, str]],
    device: str,
    seed: int,
    include_reference: bool,
) -> Iterator[Row]:
    for dtype, entry in by_dtype.items():
        row = Row(op=op, dtype=dtype, implementation=entry["impl"])
        if entry["impl"] == "reference" and not include_reference:
            row.note = f"no kernel: {entry['why']}"
        elif not hasattr(torch, dtype):
            row.note = f"torch {torch.__version__} has no {dtype}"
        else:
            _try(torch, row, device, seed)
        yield row


def _try(torch: Any, row: Row, device: str, seed: int) -> None:
    trials = importlib.import_module(f"{__name__}.trial")
    trial = trials.Trial(
        dtype=getattr(torch, row.dtype),
        device=device,
        random=torch.Generator().manual_seed(seed),
    )
    try:
        trials.CASES[row.op](trial)
        row.ok = trial.ok
        if not trial.ok:
            row.note = f"error {trial.worst:.3g}, at most {trial.bound:.3g} is allowed"
    except Exception as error:  # whatever an op raises is its failure, and the others still run
        row.ok = False
        row.note = f"{type(error).__name__}: {error}"
    row.cases = trial.cases
    row.worst = trial.worst
    row.bound = trial.bound if trial.cases else 0.0


def _facts(torch: Any, said: dict[str, Any], device: str, seed: int) -> dict[str, Any]:
    is_gpu = device == "cuda" and torch.cuda.is_available()
    return {
        "version": said["version"],
        "backend": said["backend"],
        "isa": said["isa"],
        "targets": list(_loader.targets),
        "runtime": said["runtime"],
        "device": torch.cuda.get_device_name() if is_gpu else platform.processor() or "cpu",
        "torch": str(torch.__version__),
        "hip": getattr(torch.version, "hip", None),
        "cuda": torch.version.cuda,
        "python": said["python"],
        "platform": platform.platform(),
        "seed": seed,
    }


def _torch() -> Any:
    try:
        return importlib.import_module("torch")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            "the self-test needs torch, which the references are written in: pip install torch",
            name="torch",
        ) from None
