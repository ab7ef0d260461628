#!/usr/bin/env bash
# What is checked on a machine with an NVIDIA GPU before a release (docs/releasing.md), from a checkout of the release:
#
#   tools/gpu_check.sh WHEELS OUT
#
# WHEELS holds the wheels to install: radix_kernels_cuda, radix_kernels_cpu (the other side of comparisons), radix_runtime
# and whatever Python packages the machine lacks. Nothing is downloaded. The stages run side by side, those of several
# ranks and the benches after them; OUT gets a log for each as it goes, and the figures as JSON. Exit status: how many
# stages failed. PYTHON names the interpreter, JOBS the test processes (pytest-xdist) of a stage, DEVICE what to check
# instead of cuda, ONLY (a regular expression) the stages to run, BENCH the bench families.
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
pytest=(-m pytest -q -p no:cacheprovider -o pythonpath=.)
"$python" -c "import xdist" 2>/dev/null && pytest+=(-n "${JOBS:-3}")
ops=(tests/kernel/test_{norm,layernorm,activation,rope,fused_rope,kv_cache,sampling,sampling_distribution,sampling_edits,sampling_logprobs,sampling_shards,linear,step}.py)
mapfile -t levels < <("$python" tests/kernel/isa_levels.py)
rm -f "$out"/*.log "$out"/*.line

# stage NAME SECONDS COMMAND...: runs it into OUT/NAME.log; the summary gets its last line.
stage() {
  local name=$1 limit=$2 begin=$SECONDS rc=0 log=$out/$1.log
  shift 2
  [[ $name =~ ${ONLY:-.} || $name == install* ]] || return 0
  timeout -k 10 "$limit" "$@" >"$log" 2>&1 || rc=$?
  printf '%-16s %-5s %4d s  %s\n' "$name" "$( ((rc == 0)) && echo ok || echo "rc $rc")" $((SECONDS - begin)) \
    "$(grep -v '^$' "$log" | tail -n 1 | cut -c1-110)" >"$out/$name.line"
}

pip=("$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --disable-pip-version-check)
mapfile -t common < <(find "$wheels" -type f -name '*.whl' -not -name 'radix_kernels_*')
stage install-cuda 120 "${pip[@]}" --target "$site/cuda" "$wheels"/radix_kernels_"$device"-*.whl "${common[@]}" &
stage install-cpu 120 "${pip[@]}" --target "$site/cpu" "$wheels"/radix_kernels_cpu-*.whl "${common[@]}"
wait

stage machine 60 bash -c "nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv;
  lscpu | grep -E 'Model name|^CPU\(s\)'; grep -om1 'amx[a-z0-9_]*' /proc/cpuinfo" &
stage facts 60 "${cuda[@]}" -c "
import json, platform, torch, radix_kernels as rk
facts = rk.capabilities()
print(platform.python_version(), torch.__version__, json.dumps(facts, indent=1))
assert facts['backend'] == '$device' and '$device' in facts['devices'], rk._loader.reason or [facts[key] for key in ('backend', 'isa', 'devices')]
print('native kernels of', facts['backend'], facts['isa'])" &
stage ops 200 "${cuda[@]}" "${pytest[@]}" --device "$device" "${ops[@]}" &
stage attention 200 "${cuda[@]}" "${pytest[@]}" --device "$device" tests/kernel/test_attention*.py &
stage triton 200 "${cuda[@]}" "${pytest[@]}" --device "$device" tests/kernel/test_triton_{attention,attention_fp8,mla}.py &
# Takes the GPU by itself, through the public ops without a native library.
stage triton-fp8 200 "${cuda[@]}" "${pytest[@]}" --reference tests/kernel/test_triton_{fp8,int8}.py &
stage triton-codes 400 "${cuda[@]}" "${pytest[@]}" --reference tests/kernel/test_triton_codes{,_experts}.py &
stage mla 200 "${cuda[@]}" "${pytest[@]}" --device "$device" tests/kernel/test_mla*.py &
stage gemm 200 "${cuda[@]}" "${pytest[@]}" --device "$device" tests/kernel/test_{gemm,gemm_errors,gemm_fp8,gemm_int8,gemm_many,quantize,quantize_int8}.py &
stage moe 200 "${cuda[@]}" "${pytest[@]}" --device "$device" tests/kernel/test_moe*.py tests/kernel/test_experts.py \
  tests/kernel/test_grouped_gemm.py &
stage torch-ops 200 "${cuda[@]}" "${pytest[@]}" --device "$device" tests/kernel/test_torch_ops.py &
if [[ $device == cuda ]]; then
  stage ops-cupy 200 "${cuda[@]}" "${pytest[@]}" --device cupy "${ops[@]}" &
  stage syncs 100 "${cuda[@]}" -m tests.gpu.no_sync &
  stage graphs 200 "${cuda[@]}" "${pytest[@]}" --device cuda tests/kernel/test_{cuda_graphs,launches}.py &
fi
{
  stage draws-cpu 100 "${cpu[@]}" -m tests.gpu.sampling_equality write "$site/draws.npy"
  stage draws 100 "${cuda[@]}" -m tests.gpu.sampling_equality compare "$site/draws.npy" --device "$device"
} &
stage tokens 200 "${cuda[@]}" -m tests.runtime.demo_tokens check --device "$device" &
{
  stage llama-cpu 100 "${cpu[@]}" -m tests.gpu.llama_tokens write "$site/llama.json"
  stage llama 100 "${cuda[@]}" -m tests.gpu.llama_tokens compare "$site/llama.json" --device "$device"
} &
{
  stage toggles-cpu 200 "${cpu[@]}" -m tests.gpu.toggle_tokens write "$site/toggles.json"
  stage toggles 400 "${cuda[@]}" -m tests.gpu.toggle_tokens compare "$site/toggles.json" --device "$device"
} &
stage random-load 400 "${cuda[@]}" -m tests.gpu.random_load bench/serving/models/qwen3-0.6b --device "$device" --runs 0 &
stage quantized 300 "${cuda[@]}" -m tests.gpu.quantized_tokens --device "$device" --formats block channel int8 tensor at_load &
stage codes 500 "${cuda[@]}" -m tests.gpu.quantized_tokens --device "$device" --models llama --formats awq gptq_desc_act w4a16 int4 q4_0 &
stage codes-experts 500 "${cuda[@]}" -m tests.gpu.quantized_tokens --device "$device" --models qwen3_moe --formats awq int8_weights &
stage families 500 "${cuda[@]}" -m tests.gpu.family_tokens --device "$device" &
stage graph-tokens 400 "${cuda[@]}" -m tests.gpu.graph_tokens bench/serving/models/qwen3-0.6b --requests 60 &
stage constrained 200 "${cuda[@]}" -m tests.gpu.constrained_tokens --device "$device" &
stage serve 200 "${cuda[@]}" -m tests.gpu.serve_demo --device "$device" &
# at_level FLAG LEVEL TESTS...: the CPU wheel's op tests, and these, at a level that CI may lack.
at_level() {
  grep -qw "$1" /proc/cpuinfo || return 0
  stage "$2" 400 env RADIX_TEST_FULL=1 RADIX_CPU_ISA="$2" "${cpu[@]}" "${pytest[@]}" "${levels[@]}" "${@:3}"
}
at_level amx_bf16 amx tests/runtime/test_bits.py & # of every level
at_level avx512_bf16 avx512_bf16 &
at_level avx512vl avx512 &
if grep -qw amx_bf16 /proc/cpuinfo; then
  stage amx-tokens 120 env RADIX_CPU_ISA=amx "${cpu[@]}" -m tests.runtime.demo_tokens check &
fi
wait
# What lies between rows far apart takes memory: nothing else beside them, nor beside ranks, which wait for each other.
stage far-apart 300 "${cuda[@]}" "${pytest[@]}" --device "$device" tests/kernel/test_{far_apart,page_first}.py
if [[ $device == cuda ]]; then
  stage all-reduce 400 "${cuda[@]}" "${pytest[@]}" --device cuda tests/kernel/test_all_reduce.py
  stage ranks 900 "${cuda[@]}" -m tests.gpu.tensor_parallel --ranks 2
  stage doctor-memory 900 "${cuda[@]}" -m tests.gpu.doctor_memory
fi
for family in ${BENCH:-pointwise linear gemm moe attention sampling}; do
  stage "bench-$family" 150 "${cuda[@]}" -m bench.kernels "$family" --backend "$device" --peers \
    --json "$out/bench-$family.json"
done

cat "$out"/*.line
exit "$(cat "$out"/*.line | grep -c " rc [0-9]")"
