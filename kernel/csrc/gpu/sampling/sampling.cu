// Sampling and log-probabilities on the GPU: a scan of all logits by many blocks a row, then a block a row that
// decides.
#include "api/sampling.h"
#include "gpu/sampling/row_finish.h"
#include "gpu/sampling/sampling_run.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int64_t kMostRows = 32768;  // along a grid's second side

int64_t groups_of(int64_t columns) {
  return (columns + kGroup - 1) / kGroup;
}

// Parts of a row of `quads` groups each.
int64_t parts_of(int64_t columns, int64_t quads) {
  return (groups_of(columns) + quads - 1) / quads;
}

Scratch scratch_of(char* space, int64_t rows, int64_t columns, int64_t quads) {
  Scratch s{};
  s.groups = groups_of(columns);
  s.parts = parts_of(columns, quads);
  s.tiles = (s.parts + kScanParts - 1) / kScanParts;
  s.part_groups = quads;
  s.best = reinterpret_cast<Best*>(space);
  float* floats = reinterpret_cast<float*>(s.best + rows * parts_of(columns, 1));
  for (float** part : {&s.edited.largest, &s.edited.mass, &s.given.largest, &s.given.mass}) {
    *part = floats;
    floats += rows * s.groups;
  }
  return s;
}

// Groups that a part scans: as many as leave two blocks for each multiprocessor.
int64_t quads_for(rk_device device, int64_t rows, int64_t columns) {
  for (int64_t quads : {8, 4, 2})
    if (rows * (groups_of(columns) / (kScanParts * quads)) >= 2 * multiprocessors(device)) return quads;
  return 1;
}

template <bool kEdits>
auto scan_for(int64_t quads) {
  return quads == 8   ? scan_kernel<8, kEdits>
         : quads == 4 ? scan_kernel<4, kEdits>
         : quads == 2 ? scan_kernel<2, kEdits>
                      : scan_kernel<1, kEdits>;
}

void run_finish(const char* op, rk_device device, rk_stream stream, const Finish& finish) {
  launch_dependent(op, device, stream, any(finish.edits) ? finish_kernel<true> : finish_kernel<false>,
                   dim3(static_cast<unsigned>(finish.logits.rows)), dim3(kSelectThreads), finish);
}

}  // namespace

void gpu::run_scan(const char* op, rk_device device, rk_stream stream, Scan& scan, const rk_tensor& workspace,
                   bool proposes) {
  const int64_t rows = scan.logits.rows, columns = scan.logits.columns;
  const int64_t quads = quads_for(device, rows, columns);
  scan.scratch = scratch_of(data_ptr<char>(workspace), rows, columns, quads);
  scan.scratch.proposes = proposes;
  const int64_t tiles = scan.scratch.tiles, depth = (rows + kMostRows - 1) / kMostRows;
  if (rows * tiles == 0) return;
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(rows < kMostRows ? rows : kMostRows),
                  static_cast<unsigned>(depth));
  launch_dependent(op, device, stream, any(scan.edits) ? scan_for<true>(quads) : scan_for<false>(quads), grid,
                   dim3(kScanThreads), scan);
}

namespace backend {

int64_t sampling_workspace_size(int64_t rows, int64_t columns) {
  const int64_t row = parts_of(columns, 1) * static_cast<int64_t>(sizeof(Best)) +
                      groups_of(columns) * 4 * static_cast<int64_t>(sizeof(float));
  return rows * row > 16 ? rows * row : 16;
}

void top_k_top_p_sampling(const rk_top_k_top_p_sampling_args& a, rk_stream stream) {
  const char* op = "top_k_top_p_sampling";
  const rk_device device = a.logits->device;
  const Matrix logits(*a.logits);
  Scan scan{logits, draw_of(a, logits.columns, 0), edits_of(a, 0), {}, true, a.logprob != nullptr};
  run_scan(op, device, stream, scan, *a.workspace, true);
  Finish finish{logits, scan.draw, scan.edits, scan.scratch, true, data_ptr<int32_t>(*a.out)};
  if (a.logprob) {
    finish.logprob = data_ptr<float>(*a.logprob);
    finish.top_logprobs = data_ptr<float>(*a.top_logprobs);
    finish.top_ids = data_ptr<int32_t>(*a.top_ids);
    finish.top_n = a.top_ids->shape[1];
  }
  run_finish(op, device, stream, finish);
}

void token_logprobs(const rk_token_logprobs_args& a, rk_stream stream) {
  const char* op = "token_logprobs";
  const rk_device device = a.logits->device;
  const Matrix logits(*a.logits);
  Scan scan{logits, {}, {}, {}, false, true};
  run_scan(op, device, stream, scan, *a.workspace, false);
  Finish finish{logits, {}, {}, scan.scratch, false};
  finish.ids = data_ptr<int32_t>(*a.ids);
  finish.logprob = data_ptr<float>(*a.logprob);
  finish.top_logprobs = data_ptr<float>(*a.top_logprobs);
  finish.top_ids = data_ptr<int32_t>(*a.top_ids);
  finish.top_n = a.top_ids->shape[1];
  run_finish(op, device, stream, finish);
}

}  // namespace backend
}  // namespace radix
