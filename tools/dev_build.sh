#!/bin/sh
# make dev: an incremental build of the kernel library and binding, placed into the package's source folder.
# With ONLY the build is private: its own build folder, and a package made of links beside it, so that a family can be
# worked on while another does not compile. Takes a lock, so that two of these can be started at once.
set -eu
source=kernel/python/radix_kernels
build=build/$BACKEND package=$source
if [ -n "$ONLY" ]; then
  build=build/$BACKEND-$(echo "$ONLY" | tr -c 'a-z0-9_\n' '-')
  package=$build/python/radix_kernels
fi
mkdir -p "$build" "$package/lib"
exec 9>"$build/.lock"
flock 9

tool() { if [ -x "$(dirname "$PYTHON")/$1" ]; then echo "$(dirname "$PYTHON")/$1"; else command -v "$1"; fi; }
cmake=$(tool cmake)
cutlass=
if [ "$BACKEND" = cuda ]; then cutlass=$("$PYTHON" tools/fetch_cutlass.py "$ONLY"); fi
"$cmake" -S . -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$(tool ninja)" -DRADIX_BACKEND="$BACKEND" \
  -DRADIX_ONLY="$ONLY" -DRADIX_ARCHS="${ARCHS:-}" -DRADIX_CUTLASS_DIR="$cutlass" \
  -DRADIX_PYTHONS="$(echo "${PYTHONS:-}" | tr " " ";")" -DPython_EXECUTABLE="$PYTHON" >"$build/configure.log" 2>&1 || { cat "$build/configure.log"; exit 1; }
"$cmake" --build "$build" -- -j"$JOBS"

# Replaced by renaming: a process that has the old file mapped keeps it.
place() { cmp -s "$1" "$2" || { cp "$1" "$2.new" && mv "$2.new" "$2"; }; }
place "$build/out/lib/libradix_kernels.so" "$package/lib/libradix_kernels.so"
for file in "$build"/out/_bind.*.so "$build/out/_build.json"; do place "$file" "$package/$(basename "$file")"; done
if [ "$package" != "$source" ]; then
  for file in "$source"/*; do
    case $(basename "$file") in lib | _bind.* | _build.json | __pycache__) ;; *) ln -sfn "$PWD/$file" "$package/" ;; esac
  done
  echo "PYTHONPATH=$(dirname "$package")"
fi
