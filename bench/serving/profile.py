"""`python -m bench.serving profile`: where the time of a step goes, kernels, the Python around
them, and the rest.

The functions of the native binding, the ops that the runtime calls and the parts of a step are
timed where they are called, one inside another (0.2 us for each reading of the clock). What a level
does not pass on is its own: a kernel's time is that of its function in the binding; `checks` is an
op without its kernel; `model` is the modules' Python and torch's calls; `between` is the time from
one step's end to the next one's start.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .cpu import MODEL, PEERS, WORKS


class Profile:
    """Own seconds of every label on the engine's thread, and how often it was entered."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._inside = [0.0]  # seconds spent in what each open label has called
        self._last_end: float | None = None

    def timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` with its own time and calls counted under `label`."""

        def run(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            self._inside.append(0.0)
            try:
                return function(*args, **options)
            finally:
                spent = time.perf_counter() - start
                self.seconds[label] += spent - self._inside.pop()
                self.calls[label] += 1
                self._inside[-1] += spent

        return run

    def step(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """As `timed`, and counts the time since the step before as `between`."""
        inner = self.timed("step", function)

        def run(*args: Any) -> Any:
            start = time.perf_counter()
            if self._last_end is not None:
                self.seconds["between"] += start - self._last_end
            try:
                return inner(*args)
            finally:
                self._last_end = time.perf_counter()

        return run

    def clear(self) -> None:
        """Forgets what was counted."""
        self.seconds.clear()
        self.calls.clear()
        self._last_end = None


class _Timed:
    """The native binding, or an object of it, with its functions timed."""

    def __init__(self, target: Any, profile: Profile) -> None:
        self._target = target
        self._profile = profile

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name == "Decoder":  # the one class whose objects run kernels
            return lambda *args: _Timed(found(*args), self._profile)
        if not callable(found) or isinstance(found, type):
            return found
        found = self._profile.timed(f"kernel {name}", found)
        setattr(self, name, found)
        return found


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.serving profile", description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder with a config.json")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--weights", default="bf16", choices=list(PEERS))
    parser.add_argument(
        "--works", nargs="+", default=["decode1", "decode32", "prefill"], choices=list(WORKS)
    )
    args = parser.parse_args(argv)

    from radix_kernels import _dispatch, _loader

    profile = Profile()
    bind: Any = _Timed(_loader.bind, profile)
    _loader.bind = bind
    _dispatch.choose_anew()
    from radix_runtime import ops

    from .radix import Model

    for name in [n for n in vars(ops) if callable(getattr(ops, n)) and n in _op_names()]:
        setattr(ops, name, profile.timed(f"checks {name}", getattr(ops, name)))
    model = Model(folder=args.model, weights=args.weights, threads=args.threads)
    runner = model.runner
    runner.batch.upload = profile.timed("upload", runner.batch.upload)
    runner.batch.fill = profile.timed("fill", runner.batch.fill)
    runner.model.compute_logits = profile.timed("logits", runner.model.compute_logits)
    runner.model.greedy_tokens = profile.timed("greedy tokens", runner.model.greedy_tokens)
    runner._sampler.sample = profile.timed("sample", runner._sampler.sample)
    runner.model.forward = profile.timed("model", runner.model.forward)
    runner.run = profile.step(runner.run)
    print(f"{args.model.name} {args.weights}, radix {model.version}, {args.threads} threads")
    for name in args.works:
        work = WORKS[name]
        if work.kind == "prefill":
            model.prefill(work.context)
            profile.clear()
            for _ in range(3):
                model.prefill(work.context)
        else:
            model.decode(work.batch, work.context, 1)  # brings the prompts into the cache
            profile.clear()
            model.decode(work.batch, work.context, work.steps)
        _print(work.name, profile)


def _op_names() -> set[str]:
    import radix_kernels

    return set(radix_kernels.capabilities()["ops"])


def _print(title: str, profile: Profile) -> None:
    steps = profile.calls["step"]
    total = sum(profile.seconds.values())
    kernels = sum(s for label, s in profile.seconds.items() if label.startswith("kernel "))
    share = f"{kernels / total:.1%} in kernels"
    print(f"\n{title}: {steps} steps of {total / steps * 1e3:.2f} ms, {share}")
    for label, seconds in sorted(profile.seconds.items(), key=lambda item: -item[1]):
        calls = profile.calls[label] / steps if profile.calls[label] else 1
        own = f"{seconds / steps * 1e6:10.1f} us {seconds / total:6.1%}"
        print(f"  {label:36s}{own}  {calls:6.1f} calls")
