#!/bin/sh
# make dev: an incremental build of the kernel library and binding, copied into the source tree.
# Takes a lock, so that two of these can be started at once.
set -eu
build=build/$BACKEND
package=kernel/python/radix_kernels
mkdir -p "$build" "$package/lib"
exec 9>"$build/.lock"
flock 9

tool() { if [ -x "$(dirname "$PYTHON")/$1" ]; then echo "$(dirname "$PYTHON")/$1"; else command -v "$1"; fi; }
cmake=$(tool cmake)
"$cmake" -S . -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$(tool ninja)" -DRADIX_BACKEND="$BACKEND" \
  -DRADIX_ONLY="$ONLY" -DPython_EXECUTABLE="$PYTHON" >"$build/configure.log" || { cat "$build/configure.log"; exit 1; }
"$cmake" --build "$build" -- -j"$JOBS"

# Replaced by renaming: a process that has the old file mapped keeps it.
place() { cmp -s "$1" "$2" || { cp "$1" "$2.new" && mv "$2.new" "$2"; }; }
place "$build/out/lib/libradix_kernels.so" "$package/lib/libradix_kernels.so"
for file in "$build"/out/_bind.*.so "$build/out/_build.json"; do place "$file" "$package/$(basename "$file")"; done
