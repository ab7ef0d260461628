#!/usr/bin/env bash
# compute-sanitizer over small shapes of the Hopper kernels (tests/gpu/sanitize), on a machine with a Hopper GPU:
#
#   tools/sanitize.sh PACKAGES OUT [PLANTED]
#
# PACKAGES is a folder that holds an installed radix_kernels (pip install --target). racecheck does not follow a lane that
# arrives at a barrier for its warp, so there every lane arrives for itself:
#
#   CUDAFLAGS=-DRADIX_EVERY_LANE_ARRIVES make wheel BACKEND=cuda ARCHS=90a-real
#
# Of a wheel as it is shipped it reports reads of stages that are filled anew (in `prefill` and `refill`). OUT gets a log
# for each family and tool. PLANTED is such a folder too, built with a barrier missing from decode attention as well
# (CUDAFLAGS="-DRADIX_EVERY_LANE_ARRIVES -DRADIX_PLANT_MISSING_BARRIER"): racecheck must find it there. Each
# in a fresh clone, so that no object of another build is taken. FAMILIES and TOOLS choose what runs, PYTHON the
# interpreter. Exit status: how many runs found something, plus one if the planted barrier was not found: the tool's own
# status and a hazard in its log, for a run that dies early shows nothing.
set -uo pipefail
packages=$(realpath "$1")
mkdir -p "$2"
out=$(realpath "$2")
planted=${3:+$(realpath "$3")}
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
failed=0

# check LOG PACKAGES TOOL FAMILY
check() {
  PYTHONPATH=$2:. timeout "${LIMIT:-300}" compute-sanitizer --tool "$3" --error-exitcode 99 \
    --kernel-name kernel_substring=radix "$python" -m tests.gpu.sanitize "$4" >"$out/$1.log" 2>&1
}

for tool in ${TOOLS:-memcheck racecheck}; do
  for family in ${FAMILIES:-prefill decode mla stores gemm last_tiles before_hopper grouped experts code_experts moe pointwise quantization quantized persistent refill step steps}; do
    begin=$SECONDS rc=0
    check "$family-$tool" "$packages" "$tool" "$family" || rc=$?
    ((rc == 0)) || failed=$((failed + 1))
    printf '%-8s %-10s rc %-3d %4d s  %s\n' "$family" "$tool" $rc $((SECONDS - begin)) "$(tail -n 1 "$out/$family-$tool.log")"
  done
done
if [[ $planted ]]; then
  rc=0
  check planted "$planted" racecheck decode || rc=$?
  if ((rc == 99)) && grep -qE '[1-9][0-9]* hazard' "$out/planted.log"; then
    echo "the planted missing barrier was found: $(tail -n 1 "$out/planted.log")"
  else
    echo "the planted missing barrier was NOT found (rc $rc): $(tail -n 1 "$out/planted.log")"
    failed=$((failed + 1))
  fi
fi
exit $failed
