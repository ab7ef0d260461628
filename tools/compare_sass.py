"""Whether two builds hold the same machine code: `python tools/compare_sass.py BEFORE AFTER`.

For changes that should not touch device code: moved files, renamed kernels, comments, assertions.
BEFORE and AFTER are build folders (every CUDA object in them is read), single libraries or objects,
or listings (.json) of either, which `--save LISTING` makes of AFTER. A kernel is its architecture,
its resources (registers, stack, shared memory, parameters) and its instructions with their
encodings; names of kernels and of namespaces are not part of it, so that a renamed kernel is still
the same. Kernels are compared as multisets, over the whole build and object by object. Needs
cuobjdump, no GPU. Exit status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import json
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

SHOWN = 20  # names of kernels on each side, where they differ

# A symbol or a label made from one; `.text.<symbol>` and the like are covered by their last part.
SYMBOL = re.compile(r"\$?[\w$.]*_Z[\w$.]+")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/|^\s+/\* 0x[0-9a-f]{16} \*/|^\.L_")
USAGE = re.compile(r"^ *Function (\S+):\s*\n +(REG:.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """One kernel of one object. `digest` stands for all that is compared."""

    name: str
    arch: str
    usage: str
    digest: str


def find_cuobjdump() -> str:
    """The toolkit's, or the one that Triton's package brings."""
    places = ["cuobjdump", "/usr/local/cuda/bin/cuobjdump"]
    packages = Path(sys.prefix).glob("lib/python3.*/site-packages/triton/backends/nvidia/bin")
    places += [str(folder / "cuobjdump") for folder in packages]
    for place in places:
        if program := shutil.which(place):
            return program
    raise SystemExit("cuobjdump is not installed: it comes with the CUDA toolkit and with triton")


def cuobjdump(flag: str, path: Path) -> str:
    """A dump of one file; empty where it holds no device code."""
    done = subprocess.run([find_cuobjdump(), flag, str(path)], capture_output=True, text=True)
    return done.stdout


def sections(text: str) -> dict[str, str]:
    """Architecture -> what a dump says about it."""
    parts = re.split(r"(?m)^arch = (\S+)$", text)
    found: dict[str, str] = collections.defaultdict(str)
    for arch, body in zip(parts[1::2], parts[2::2], strict=True):
        found[arch] += body
    return found


def kernels_of(path: Path) -> list[Kernel]:
    """The kernels in one object or library; none where it holds no device code."""
    code = sections(cuobjdump("-sass", path))
    if not any(code.values()):
        return []
    usages = sections(cuobjdump("-res-usage", path))
    found = []
    for arch, text in code.items():
        usage = dict(USAGE.findall(usages.get(arch, "")))
        functions = re.split(r"(?m)^\s+Function : (\S+)$", text)
        for name, body in zip(functions[1::2], functions[2::2], strict=True):
            lines = [line for line in body.splitlines() if INSTRUCTION.match(line)]
            plain = SYMBOL.sub("SYMBOL", "\n".join([arch, usage.get(name, ""), *lines]))
            digest = hashlib.sha256(plain.encode()).hexdigest()
            found.append(Kernel(name=name, arch=arch, usage=usage.get(name, ""), digest=digest))
    return found


def objects_of(place: Path) -> list[list[Kernel]]:
    """The kernels of each object with device code: of a build folder, one file, or a listing."""
    if place.suffix == ".json":
        return [
            [Kernel(**fields) for fields in kernels] for kernels in json.loads(place.read_text())
        ]
    files = [place]
    if place.is_dir():
        files = sorted(place.rglob("*.cu.o"))
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(kernels_of, files))
    return [kernels for kernels in found if kernels]


def readable(names: list[str]) -> list[str]:
    done = subprocess.run(["c++filt"], input="\n".join(names), capture_output=True, text=True)
    return [re.sub(r"\(anonymous namespace\)::", "", line) for line in done.stdout.splitlines()]


def report_missing(side: str, kernels: list[Kernel], missing: collections.Counter[str]) -> None:
    """Names the kernels of one side whose code the other side does not have."""
    left = missing.copy()
    unmatched = []
    for kernel in kernels:
        if left[kernel.digest] > 0:
            left[kernel.digest] -= 1
            unmatched.append(kernel)
    names = readable([kernel.name for kernel in unmatched[:SHOWN]])
    print(f"only {side}: {len(unmatched)} kernels")
    for kernel, name in zip(unmatched, names, strict=False):
        print(f"  {kernel.arch} {name[:150]}  {kernel.usage}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--save", type=Path, metavar="LISTING", help="write what AFTER holds")
    args = parser.parse_args()
    before = objects_of(args.before)
    after = objects_of(args.after)
    if args.save:
        listing = [[asdict(kernel) for kernel in kernels] for kernels in after]
        args.save.write_text(json.dumps(listing, indent=1))
    if not before or not after:
        print("no device code found", file=sys.stderr)
        return 1
    kernels_before = [kernel for kernels in before for kernel in kernels]
    kernels_after = [kernel for kernels in after for kernel in kernels]
    digests_before = collections.Counter(kernel.digest for kernel in kernels_before)
    digests_after = collections.Counter(kernel.digest for kernel in kernels_after)
    grouped_before = collections.Counter(
        tuple(sorted(kernel.digest for kernel in kernels)) for kernels in before
    )
    grouped_after = collections.Counter(
        tuple(sorted(kernel.digest for kernel in kernels)) for kernels in after
    )
    same = (digests_before & digests_after).total()
    same_objects = (grouped_before & grouped_after).total()
    print(f"before: {len(kernels_before)} kernels in {len(before)} objects")
    print(f"after:  {len(kernels_after)} kernels in {len(after)} objects")
    print(f"same machine code: {same} kernels; {same_objects} objects with the same kernels")
    report_missing("before", kernels_before, digests_before - digests_after)
    report_missing("after", kernels_after, digests_after - digests_before)
    return int(digests_before != digests_after or grouped_before != grouped_after)


if __name__ == "__main__":
    sys.exit(main())
