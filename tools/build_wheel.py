"""Builds the kernel wheel of one backend: `make wheel BACKEND=cpu|cuda|rocm`.

Stages a copy of what the wheel needs under build/<backend>-wheel/src with the backend's pyproject
file as pyproject.toml, runs pip on it (scikit-build-core, cmake, ninja), and gives the result the
manylinux tag that its symbols allow. Only changed files are staged anew and the build folder is
kept, so a second run compiles what changed. Backends do not share a folder.

The ROCm library's code for gfx950 needs clang 20 or later. Where none is installed, that of PyPI's
package `ziglang` makes it, which is fetched into build/ziglang. The CUDA library's kernels for
chips beside Hopper need CUTLASS (fetch_cutlass.py).
"""

from __future__ import annotations

import argparse
import base64
import filecmp
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BACKENDS = ("cpu", "cuda", "rocm")
STAGED = ("CMakeLists.txt", "LICENSE", "cmake", "kernel")
# Outputs of `make dev` lie inside the package's source folder.
SKIPPED = re.compile(r"(^|/)(__pycache__|lib)(/|$)|\.so$|\.new$|/_build\.json$")
GLIBC_FLOOR = (2, 34)
ZIGLANG = "ziglang==0.16.0"  # clang 21.1
NEWEST_TARGET = "gfx950"
HIP_COMPILERS = ("amdclang++", "clang++-21", "clang++-20", "clang++-19")  # as RadixHip.cmake
BUILD_MODULES = ("scikit_build_core", "pybind11", "cmake", "ninja")


def wanted_files(root: Path = ROOT) -> dict[str, Path]:
    """Relative path in the stage -> source file, for everything but pyproject.toml.

    In a git checkout the files that git knows (`git add` is enough), so that no stray file gets
    into a wheel.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-z", *STAGED], cwd=root, capture_output=True, text=True
    ).stdout
    known = set(listed.split("\0")) - {""}
    files: dict[str, Path] = {}
    for name in STAGED:
        top = root / name
        for path in [top] if top.is_file() else sorted(top.rglob("*")):
            relative = path.relative_to(root).as_posix()
            if not path.is_file() or SKIPPED.search(relative):
                continue
            if known and relative not in known:
                print(f"left out, for git does not know it: {relative}", file=sys.stderr)
            else:
                files[relative] = path
    return files


def stage(backend: str, target: Path) -> None:
    """Makes target an exact copy; files that did not change keep their time stamps."""
    files = wanted_files()
    files["pyproject.toml"] = ROOT / f"pyproject_{backend}.toml"
    for path in [p for p in target.rglob("*") if p.is_file()]:
        if path.relative_to(target).as_posix() not in files:
            path.unlink()
    for relative, source in files.items():
        copy = target / relative
        if copy.exists() and filecmp.cmp(source, copy, shallow=False):
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, copy)
        os.utime(copy)  # newer than what was built from the last copy


def knows(compiler: str, target: str) -> bool:
    """Whether a clang compiles for that GPU."""
    command = [compiler, "--target=amdgcn-amd-amdhsa", f"-mcpu={target}", "-nogpulib"]
    done = subprocess.run([*command, "-x", "c", "-E", "/dev/null"], capture_output=True)
    return done.returncode == 0


def hip_compiler() -> str | None:
    """The clang that RadixHip.cmake finds."""
    places = [Path(os.environ.get("ROCM_PATH", "/opt/rocm"), "llvm/bin"), "/opt/rocm/llvm/bin"]
    path = os.pathsep.join([*map(str, places), os.environ.get("PATH", "")])
    return next(filter(None, (shutil.which(name, path=path) for name in HIP_COMPILERS)), None)


def newer_clang(archs: str) -> str:
    """The `zig` whose clang compiles for gfx950; '' where it is not needed. Ends the program where
    it cannot be had."""
    compiler = hip_compiler()
    is_wanted = not archs or NEWEST_TARGET in archs
    if compiler is None or not is_wanted or knows(compiler, NEWEST_TARGET):
        return ""
    folder = ROOT / "build/ziglang"
    zig = folder / "ziglang/zig"
    if not zig.exists():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
        done = subprocess.run([*command, ZIGLANG], capture_output=True, text=True)
        if done.returncode:
            problem = done.stderr.strip().splitlines()[-1:]
            raise SystemExit(
                f"{compiler} does not know {NEWEST_TARGET}, and {ZIGLANG} cannot be installed:"
                f' {" ".join(problem)} (ARCHS="gfx90a;gfx942" builds without it)'
            )
    return str(zig)


def cutlass(families: str) -> str:
    """The folder of CUTLASS, `none` for a build without, or '' where CMake has to look for it."""
    command = [sys.executable, str(ROOT / "tools/fetch_cutlass.py"), families]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.strip()


def build_command(
    folder: Path, out: Path, pythons: list[str], archs: str, families: str, more: dict[str, str]
) -> list[str]:
    """pip wheel of the stage; more: settings of one backend. Every setting is given, empty ones
    too: the kept build folder remembers the last."""
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(out)]
    command += ["--disable-pip-version-check", "--quiet", "-C", f"build-dir={folder / 'build'}"]
    command += ["-C", f"cmake.define.RADIX_PYTHONS={';'.join(pythons)}"]  # empty: this one
    command += ["-C", f"cmake.define.RADIX_ARCHS={archs}"]  # empty: those of a release
    for name, value in more.items():
        command += ["-C", f"cmake.define.{name}={value}"]
    # Empty: all families.
    command += [
        "-C",
        f"cmake.define.RADIX_ONLY={';'.join(re.split('[ ,;]+', families.strip()))}",
    ]
    if all(importlib.util.find_spec(name) for name in BUILD_MODULES):
        command.append("--no-build-isolation")  # else pip fetches them, and compiles all anew
    return [*command, str(folder / "src")]


def build(
    folder: Path, pythons: list[str], archs: str, families: str, jobs: int, more: dict[str, str]
) -> Path:
    """Runs pip wheel on the stage; returns the wheel as scikit-build-core named it."""
    out = Path(tempfile.mkdtemp(dir=folder, prefix="wheel-"))
    env = dict(os.environ, CMAKE_BUILD_PARALLEL_LEVEL=str(jobs))
    env["PATH"] = str(Path(sys.executable).parent) + os.pathsep + env["PATH"]
    command = build_command(folder, out, pythons, archs, families, more)
    subprocess.run(command, check=True, env=env)
    (wheel,) = out.glob("*.whl")
    return wheel


def highest_glibc(wheel: zipfile.ZipFile) -> tuple[int, int]:
    """The newest GLIBC symbol version that any library in the wheel asks for."""
    found = [(0, 0)]
    for name in wheel.namelist():
        if name.endswith(".so"):
            for version in re.findall(rb"\0GLIBC_(\d+)\.(\d+)", wheel.read(name)):
                found.append((int(version[0]), int(version[1])))
    return max(found)


def retag(built: Path, dist: Path) -> Path:
    """Writes the wheel into dist as py3-none-manylinux_X_Y_x86_64."""
    with zipfile.ZipFile(built) as source:
        major, minor = max(highest_glibc(source), GLIBC_FLOOR)
        tag = f"py3-none-manylinux_{major}_{minor}_x86_64"
        name, version = built.name.split("-")[:2]
        target = dist / f"{name}-{version}-{tag}.whl"
        info = f"{name}-{version}.dist-info"
        facts = re.sub(r"(?m)^Tag: .*$", f"Tag: {tag}", source.read(f"{info}/WHEEL").decode())
        digest = base64.urlsafe_b64encode(hashlib.sha256(facts.encode()).digest()).rstrip(b"=")
        line = f"{info}/WHEEL,sha256={digest.decode()},{len(facts.encode())}"
        record = source.read(f"{info}/RECORD").decode()
        record = re.sub(rf"(?m)^{re.escape(info)}/WHEEL,.*$", line, record)
        changed = {f"{info}/WHEEL": facts, f"{info}/RECORD": record}
        partial = target.with_suffix(".part")
        with zipfile.ZipFile(
            file=partial, mode="w", compression=zipfile.ZIP_DEFLATED, compresslevel=9
        ) as out:
            for item in source.infolist():
                out.writestr(item, changed.get(item.filename, source.read(item.filename)))
    for old in dist.glob(f"{name}-*.whl"):
        old.unlink()
    partial.rename(target)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backend", choices=BACKENDS)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--pythons", nargs="*", default=[], help="interpreters to bind for")
    parser.add_argument(
        "--archs", default="", help="GPU targets instead of a release's, as CMake's list"
    )
    parser.add_argument(
        "--families", default="", help="only these families of kernels, e.g. gemm or 'gemm norm'"
    )
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    folder = ROOT / "build" / f"{args.backend}-wheel"
    (folder / "src").mkdir(parents=True, exist_ok=True)
    args.dist.mkdir(parents=True, exist_ok=True)
    stage(args.backend, folder / "src")
    more = {}
    if args.backend == "rocm":
        more["RADIX_ZIG"] = newer_clang(args.archs)
    elif args.backend == "cuda":
        more["RADIX_CUTLASS_DIR"] = cutlass(args.families)
    built = build(folder, args.pythons, args.archs, args.families, args.jobs, more)
    wheel = retag(built, args.dist)
    shutil.rmtree(built.parent)
    print(f"{wheel} ({wheel.stat().st_size / 1e6:.1f} MB)")


if __name__ == "__main__":
    main()
