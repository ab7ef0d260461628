#!/usr/bin/env bash
# What is checked on a machine with an NVIDIA GPU before a release (docs/releasing.md), from a checkout of the release:
#
#   tools/gpu_check.sh WHEELS OUT
#
# WHEELS holds the wheels to install: radix_kernels_cuda, radix_kernels_cpu (the other side of comparisons), radix_runtime
# and whatever Python packages the machine lacks. Nothing is downloaded. OUT gets check.log and bench.json. Exit status:
# how many stages failed. PYTHON names the interpreter, JOBS the test processes (pytest-xdist) of a stage, DEVICE what to
# check instead of cuda, ONLY (a regular expression) the stages to run.
set -uo pipefail
wheels=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
device=${DEVICE:-cuda}
site=$(mktemp -d)
cuda=(env "PYTHONPATH=$site/cuda:." "$python")
cpu=(env "PYTHONPATH=$site/cpu:." "$python")
amx=(env RADIX_CPU_ISA=amx "${cpu[@]}")
pytest=(-m pytest -q -p no:cacheprovider -o pythonpath=.)
"$python" -c "import xdist" 2>/dev/null && pytest+=(-n "${JOBS:-6}")
ops=(tests/kernel/test_{norm,activation,rope,kv_cache,sampling,linear}.py)
failed=0
summary=()
: >"$out/check.log"

# stage NAME SECONDS COMMAND...: runs it, keeps its output, and for the summary the last line of it.
stage() {
  local name=$1 limit=$2 begin=$SECONDS rc=0 part=$out/$1.part
  shift 2
  [[ $name =~ ${ONLY:-.} || $name == install* ]] || return 0
  timeout -k 10 "$limit" "$@" >"$part" 2>&1 || rc=$?
  { echo "=== $name: exit $rc, $((SECONDS - begin)) s"; cat "$part"; } >>"$out/check.log"
  if ((rc != 0)); then
    failed=$((failed + 1))
    echo "--- $name"
    tail -n 25 "$part"
  fi
  summary+=("$(printf '%-16s %-5s %4d s  %s' "$name" "$( ((rc == 0)) && echo ok || echo "rc $rc")" \
    $((SECONDS - begin)) "$(grep -v '^$' "$part" | tail -n 1 | cut -c1-110)")")
  rm "$part"
}

pip=("$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check)
mapfile -t common < <(find "$wheels" -type f -name '*.whl' -not -name 'radix_kernels_*')
stage install-cuda 120 "${pip[@]}" --target "$site/cuda" "$wheels"/radix_kernels_"$device"-*.whl "${common[@]}"
stage install-cpu 120 "${pip[@]}" --target "$site/cpu" "$wheels"/radix_kernels_cpu-*.whl "${common[@]}"

stage machine 60 bash -c "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv;
  lscpu | grep -E 'Model name|^CPU\(s\)'; grep -om1 'amx[a-z0-9_]*' /proc/cpuinfo"
stage facts 60 "${cuda[@]}" -c "
import json, platform, torch, radix_kernels as rk
print(platform.python_version(), torch.__version__, json.dumps(rk.capabilities(), indent=1))"
stage ops 150 "${cuda[@]}" "${pytest[@]}" --device "$device" "${ops[@]}"
if [[ $device == cuda ]]; then
  stage ops-cupy 150 "${cuda[@]}" "${pytest[@]}" --device cupy "${ops[@]}"
  stage syncs 60 "${cuda[@]}" -m tests.gpu.no_sync
fi
stage draws-cpu 60 "${cpu[@]}" -m tests.gpu.sampling_equality write "$site/draws.npy"
stage draws 60 "${cuda[@]}" -m tests.gpu.sampling_equality compare "$site/draws.npy" --device "$device"
stage tokens 150 "${cuda[@]}" -m tests.runtime.demo_tokens check --device "$device"
stage serve 150 "${cuda[@]}" -m tests.gpu.serve_demo --device "$device"
stage attention 200 "${cuda[@]}" "${pytest[@]}" --device "$device" tests/kernel/test_{attention,triton_attention}.py
if grep -q amx_bf16 /proc/cpuinfo; then
  stage amx 150 "${amx[@]}" "${pytest[@]}" "${ops[@]}" tests/kernel/test_attention.py
  stage amx-tokens 90 "${amx[@]}" -m tests.runtime.demo_tokens check
fi
stage bench 150 "${cuda[@]}" -m bench.kernels all --backend "$device" --json "$out/bench.json"

printf '%s\n' "" "${summary[@]}"
exit "$failed"
