"""What is in the wheels of dist/ (see `make wheel`), or in those that the tests of a GPU's wheel
have built: dependencies, symbols, size, tag."""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

from tests.kernel import gpu_objects
from tests.kernel.gpu_wheels import FOLDER as TEST_WHEELS
from tests.kernel.gpu_wheels import RELEASE

ROOT = Path(__file__).resolve().parents[2]
VERSION = (ROOT / "kernel" / "VERSION").read_text().strip()
TAG = "py3-none-manylinux_2_34_x86_64"
NEEDED = {"libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "ld-linux-x86-64.so.2"}
LIMITS_MB = {"cpu": 15, "cuda": 100, "rocm": 60}
ONE_GPU_MB = 40  # a CUDA wheel with machine code for one architecture
REQUIRED = {"cuda": "cuda", "rocm": "hip"}  # what REQUIRE calls a backend


BACKENDS = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.builds("cuda")),
    pytest.param("rocm", marks=pytest.mark.builds("rocm")),
]


@pytest.fixture(scope="module", params=BACKENDS)
def wheel(request) -> Path:
    """The backend's wheel; the CPU's is built when it is not there."""
    backend = request.param
    pattern = f"radix_kernels_{backend}-*.whl"
    found = sorted((ROOT / "dist").glob(pattern)) or sorted(TEST_WHEELS.glob(pattern))
    if not found and backend != "cpu":
        text = f"no {backend} wheel in dist/ (make wheel BACKEND={backend})"
        assert REQUIRED[backend] not in os.environ.get("REQUIRE", "").split(","), text
        pytest.skip(text)
    if not found:
        command = ["make", "wheel", f"BACKEND={backend}", f"PYTHON={sys.executable}"]
        subprocess.run(command, cwd=ROOT, check=True, timeout=280)
        found = sorted((ROOT / "dist").glob(pattern))
    assert len(found) == 1, found
    return found[0]


@pytest.fixture(scope="module")
def unpacked(wheel, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def libraries(unpacked: Path) -> list[Path]:
    found = sorted(unpacked.rglob("*.so*"))
    assert next(p.name for p in found if p.parent.name == "lib") == "libradix_kernels.so"
    assert any(p.name.startswith("_bind.cpython-3") for p in found)
    return found


def readelf(*args: str) -> str:
    command = ["readelf", "-W", *args]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def backend_of(wheel: Path) -> str:
    return wheel.name.split("-")[0].rsplit("_", 1)[1]


def test_name_tag_and_size(wheel, unpacked):
    backend = backend_of(wheel)
    assert wheel.name == f"radix_kernels_{backend}-{VERSION}-{TAG}.whl"
    limit = (
        ONE_GPU_MB if backend == "cuda" and len(gpu_targets(unpacked)) == 1 else LIMITS_MB[backend]
    )
    assert wheel.stat().st_size < limit * 1e6


def gpu_targets(unpacked: Path) -> set[str]:
    """The architectures that a CUDA library has machine code for; without CUDA's tools a release's
    are assumed."""
    if (tool := gpu_objects.cuobjdump()) is None:
        return set(RELEASE)
    command = [tool, "--list-elf", str(unpacked / "radix_kernels/lib/libradix_kernels.so")]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return set(re.findall(r"\.(sm_\w+)\.cubin", listed))


def test_metadata(wheel, unpacked):
    info = unpacked / f"radix_kernels_{backend_of(wheel)}-{VERSION}.dist-info"
    facts = Parser().parsestr((info / "WHEEL").read_text())
    assert facts.get_all("Tag") == [TAG] and facts["Root-Is-Purelib"] == "false"
    meta = Parser().parsestr((info / "METADATA").read_text())
    assert meta["Name"] == f"radix-kernels-{backend_of(wheel)}" and meta["Version"] == VERSION
    assert meta["Requires-Python"] == ">=3.10"
    licence = "Apache-2.0 AND BSD-3-Clause" if backend_of(wheel) == "cuda" else "Apache-2.0"
    assert meta["License-Expression"] == licence
    assert not [r for r in meta.get_all("Requires-Dist") or [] if "torch" in r]


def test_record_matches_content(wheel, unpacked):
    record = unpacked / f"radix_kernels_{backend_of(wheel)}-{VERSION}.dist-info" / "RECORD"
    rows = {row[0]: row[1:] for row in csv.reader(record.read_text().splitlines())}
    files = {p.relative_to(unpacked).as_posix() for p in unpacked.rglob("*") if p.is_file()}
    assert files == set(rows)
    for name, (digest, size) in rows.items():
        if name == record.relative_to(unpacked).as_posix():
            continue
        data = (unpacked / name).read_bytes()
        hashed = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        assert (digest, int(size)) == (f"sha256={hashed}", len(data)), name


def test_package_is_whole(unpacked):
    package = unpacked / "radix_kernels"
    source = ROOT / "kernel" / "python" / "radix_kernels"
    for name in ("__init__.py", "_loader.py", "py.typed", "reference/__init__.py"):
        assert (package / name).read_bytes() == (source / name).read_bytes()
    assert not list(unpacked.rglob("__pycache__")) and (package / "_build.json").exists()
    command = ["git", "ls-files", "."]
    tracked = subprocess.run(command, cwd=source, capture_output=True, text=True).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout: which files belong is not known")
    built = {
        "_build.json",
        "lib/libradix_kernels.so",
        *(p.name for p in package.glob("_bind.*.so")),
    }
    assert {
        p.relative_to(package).as_posix() for p in package.rglob("*") if p.is_file()
    } - built == set(tracked)


def test_licences_are_in_it(wheel, unpacked):
    """Ours, and of a CUDA wheel that of CUTLASS."""
    (folder,) = unpacked.glob("*.dist-info/licenses")
    expected = {"LICENSE"}
    if backend_of(wheel) == "cuda":
        expected.add("kernel/licenses/CUTLASS.txt")
    found = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    assert found == expected
    for name in found:
        assert (folder / name).read_bytes() == (ROOT / name).read_bytes()


def test_needed_libraries(unpacked):
    for library in libraries(unpacked):
        dynamic = readelf("-d", str(library))
        needed = set(re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic))
        allowed = NEEDED | ({"libradix_kernels.so"} if library.name.startswith("_bind") else set())
        assert needed <= allowed, (library.name, needed - allowed)
        if library.name.startswith("_bind"):
            assert re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", dynamic) == ["$ORIGIN/lib"]
            assert library.stat().st_size < 400_000


def test_highest_glibc_symbol(unpacked):
    for library in libraries(unpacked):
        asked = re.findall(r"GLIBC_(\d+)\.(\d+)", readelf("--version-info", str(library)))
        highest = max((int(major), int(minor)) for major, minor in asked)
        assert highest <= (2, 34), (library.name, highest)
        assert "GLIBCXX" not in readelf("--version-info", str(library)), library.name


def test_exported_symbols(unpacked):
    for library in libraries(unpacked):
        rows = [line.split() for line in readelf("--dyn-syms", str(library)).splitlines()]
        defined = {r[7].split("@")[0] for r in rows if len(r) > 7 and r[6].isdigit()}
        pattern = r"PyInit__bind" if library.name.startswith("_bind") else r"(rk|radix)_\w+"
        assert defined, library.name
        strange = [name for name in defined if not re.fullmatch(pattern, name)]
        assert not strange, (library.name, strange)


def test_only_what_git_knows_is_staged(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("build_wheel", ROOT / "tools/build_wheel.py")
    assert spec and spec.loader
    build_wheel = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build_wheel)
    package = tmp_path / "kernel/python"
    (package / "lib").mkdir(parents=True)
    for name in ("kept.py", "stray.py", "lib/built.so"):
        (package / name).touch()
    everything = {"kernel/python/kept.py", "kernel/python/stray.py"}
    assert set(build_wheel.wanted_files(tmp_path)) == everything  # an unpacked archive
    for command in (["init", "-q"], ["add", "kernel/python/kept.py"]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    assert set(build_wheel.wanted_files(tmp_path)) == {"kernel/python/kept.py"}
    assert capsys.readouterr().err == "left out, for git does not know it: kernel/python/stray.py\n"


# ------------------------------------------------------------------ the installed wheel


def isolated(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Runs code with the wheel and the standard library only: no site-packages, no torch."""
    code = f"import sys; sys.path.insert(0, {str(folder)!r})\n{code}"
    command = [sys.executable, "-I", "-S", "-c", code]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def site(wheel, tmp_path_factory) -> Path:
    """Installed by pip, which also checks the tag against this machine."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--quiet"]
    subprocess.run([*command, "--target", str(folder), str(wheel)], check=True, timeout=120)
    return folder


@pytest.fixture
def installed(site, tmp_path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(site, tmp_path / "site")


def test_import_without_any_framework(installed, wheel):
    code = (
        "import radix_kernels as rk\n"
        "facts = rk.capabilities()\n"
        "print(rk.__version__, rk.abi_version, facts['backend'], 'torch' in sys.modules)\n"
        "print(rk._loader.reason, end='')"
    )
    done = isolated(installed, code)
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{VERSION} 1 {backend_of(wheel)} False\n"


def test_other_interpreter_is_told_what_is_there(installed):
    for binding in (installed / "radix_kernels").glob("_bind.*.so"):
        binding.rename(binding.with_name("_bind.cpython-399-x86_64-linux-gnu.so"))
    done = isolated(installed, "import radix_kernels as rk; print(rk._loader.reason)")
    own = sys.implementation.cache_tag
    text = f"no native library for {own} in this installation, which has cpython-399-x86_64"
    assert text in done.stdout, done.stderr


def test_broken_library_is_not_hidden(installed):
    (installed / "radix_kernels" / "lib" / "libradix_kernels.so").unlink()
    done = isolated(installed, "import radix_kernels as rk; print(rk._loader.reason)")
    assert "the native library cannot be loaded: libradix_kernels.so" in done.stdout, done.stderr


def test_sibling_distributions_are_refused(installed, wheel):
    other = "cuda" if backend_of(wheel) != "cuda" else "cpu"
    (mine,) = installed.glob("radix_kernels_*.dist-info")
    sibling = installed / f"radix_kernels_{other}-{VERSION}.dist-info"
    shutil.copytree(mine, sibling)
    meta = sibling / "METADATA"
    meta.write_text(
        meta.read_text().replace(
            f"Name: radix-kernels-{backend_of(wheel)}", f"Name: radix-kernels-{other}"
        )
    )
    done = isolated(installed, "import radix_kernels")
    names = sorted([f"radix-kernels-{backend_of(wheel)}", f"radix-kernels-{other}"])
    assert done.returncode != 0
    assert f"ImportError: {' and '.join(names)} are installed together" in done.stderr
    assert f"pip uninstall -y {' '.join(names)}" in done.stderr
