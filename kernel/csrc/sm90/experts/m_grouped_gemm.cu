// The entries of the grouped products, and what a launch ahead of them prepares: where each group's rows are, and x's
// scales by chunks of k.
#include "api/experts.h"
#include "sm90/common/pdl.cuh"
#include "sm90/experts/grouped_persistent.cuh"

namespace radix {
namespace experts {
namespace {

constexpr int kThreads = 256, kTile = 32;

struct Preparation {
  const int32_t* indices;  // [rows], each row's group, or null
  const int32_t* counts;   // [groups] with room, or null
  int64_t rows;
  int room, groups;
  int32_t *begins, *ends;
  const float* scales;  // [rows, blocks], or null
  float* transposed;    // [blocks, step]
  int blocks, step;
};

// By one block: the rows where a group begins and ends. A group without rows has none of either.
__device__ void find_groups(const Preparation& p) {
  for (int g = threadIdx.x; g < p.groups; g += kThreads) p.begins[g] = p.ends[g] = 0;
  __syncthreads();
  for (int64_t i = threadIdx.x; i < p.rows; i += kThreads) {
    const int group = p.indices[i];
    if (group < 0 || group >= p.groups) continue;
    if (i == 0 || p.indices[i - 1] != group) p.begins[group] = static_cast<int32_t>(i);
    if (i + 1 == p.rows || p.indices[i + 1] != group) p.ends[group] = static_cast<int32_t>(i + 1);
  }
}

// Block 0 finds the groups, the others transpose scales, kTile rows at a time.
__global__ void __launch_bounds__(kThreads) prepare_kernel(Preparation p) {
  __shared__ float tile[kTile][kTile + 1];
  sm90::pdl_wait();
  sm90::pdl_trigger();
  if (p.indices && blockIdx.x == 0) return find_groups(p);
  const int first_block = p.indices ? 1 : 0, lane = threadIdx.x % kTile, warp = threadIdx.x / kTile;
  if (!p.scales) return;
  for (int64_t row = int64_t{blockIdx.x - first_block} * kTile; row < p.rows;
       row += int64_t{gridDim.x - first_block} * kTile) {
    for (int block = 0; block < p.blocks; block += kTile) {
      for (int i = warp; i < kTile; i += kThreads / kTile) {
        const int64_t at = row + i;
        const bool there = at < p.rows && block + lane < p.blocks && (!p.room || at % p.room < p.counts[at / p.room]);
        tile[i][lane] = there ? p.scales[at * p.blocks + block + lane] : 0.f;
      }
      __syncthreads();
      for (int i = warp; i < kTile; i += kThreads / kTile)
        if (block + i < p.blocks && row + lane < p.rows)
          p.transposed[int64_t{block + i} * p.step + row + lane] = tile[lane][i];
      __syncthreads();
    }
  }
}

struct GroupedLayout {
  int64_t ends, scales, all;

  explicit GroupedLayout(const rk_m_grouped_gemm_sizes& s) {
    const auto up = [](int64_t bytes) { return (bytes + 255) / 256 * 256; };
    ends = up(s.groups * 4);
    scales = 2 * ends;
    const int64_t narrow = scales + (s.fp8 ? up((s.k + 127) / 128 * ((s.rows + 3) / 4 * 4) * 4) : 0);
    all = std::max(narrow, TileList::bytes(s.rows, static_cast<int>(s.groups)));
  }
};

// Not for few rows, where the weights' bytes bound both, nor where its tiles of 128 rows would be a sixth empty or
// more.
bool persistent_is_faster(const Grouped& g) {
  const int tiles = (g.expected + gemm::kPersistentTokens - 1) / gemm::kPersistentTokens;
  return g.expected > 64 && (tiles == 1 || g.expected * 6 > tiles * gemm::kPersistentTokens * 5);
}

void run_persistent(const Grouped& g, const int32_t* groups, const float* x_scale, TileList list) {
  const auto tiles = [](int64_t rows) {
    return static_cast<int>((rows + gemm::kPersistentTokens - 1) / gemm::kPersistentTokens);
  };
  g.room ? list_masked(g.q, groups, g.room, g.groups, list) : list_contiguous(g.q, groups, g.rows, g.groups, list);
  PersistentProduct w = {};
  w.op = g.q.op;
  w.device = g.q.device;
  w.stream = g.q.stream;
  w.x = g.x;
  w.weight = g.weight;
  w.x_step = g.x_step;
  w.rows = g.rows;
  w.groups = g.groups;
  w.n = g.n;
  w.k = g.k;
  w.expected = g.room ? g.groups * tiles(g.expected) : tiles(g.rows);
  w.tiles = list.groups();
  w.x_scale = x_scale;
  w.x_scale_step = (g.k + 127) / 128;
  w.x_scale_unit = 1;
  w.w_scale = g.w_scale;
  w.out = g.out;
  w.out_step = g.out_step;
  grouped_persistent_fp8(w);
}

}  // namespace
}  // namespace experts

namespace backend {

using namespace experts;

int64_t m_grouped_gemm_workspace_size(const rk_m_grouped_gemm_sizes& s) {
  return GroupedLayout(s).all;
}

void m_grouped_gemm(const rk_m_grouped_gemm_args& args, rk_stream stream) {
  const rk_tensor &x = *args.x, &weight = *args.weight, &out = *args.out;
  const bool masked = x.ndim == 3, fp8 = args.x_scale != nullptr;
  Grouped g = {};
  g.q.op = "m_grouped_gemm";
  g.q.device = x.device;
  g.q.stream = stream;
  g.q.type = dtype_of(out);
  g.x = data_ptr<char>(x);
  g.weight = data_ptr<char>(weight);
  g.x_step = x.strides[x.ndim - 2] * element_size(x);
  g.out_step = out.strides[out.ndim - 2];
  g.rows = masked ? x.shape[0] * x.shape[1] : x.shape[0];
  g.room = masked ? static_cast<int>(x.shape[1]) : 0;
  g.groups = static_cast<int>(weight.shape[0]);
  g.n = static_cast<int>(weight.shape[1]);
  g.k = static_cast<int>(weight.shape[2]);
  g.expected = masked ? std::min(args.expected_m, g.room) : static_cast<int>(g.rows / g.groups);
  g.out = data_ptr<char>(out);
  g.scale_step = static_cast<int>((g.rows + 3) / 4 * 4);
  const GroupedLayout at({sizeof(rk_m_grouped_gemm_sizes), fp8, g.rows, g.groups, g.k});
  char* workspace = data_ptr<char>(*args.workspace);
  const auto* groups = data_ptr<int32_t>(*args.groups);
  if (fp8) g.w_scale = data_ptr<float>(*args.weight_scale);
  if (fp8 && persistent_is_faster(g))
    return run_persistent(g, groups, data_ptr<float>(*args.x_scale), TileList{workspace});
  Preparation p = {};
  p.rows = g.rows;
  p.room = g.room;
  p.groups = g.groups;
  if (masked) {
    g.ends = p.counts = groups;
  } else {
    p.indices = groups;
    g.begins = p.begins = reinterpret_cast<int32_t*>(workspace);
    g.ends = p.ends = reinterpret_cast<int32_t*>(workspace + at.ends);
  }
  if (fp8) {
    p.scales = data_ptr<float>(*args.x_scale);
    g.x_scale = p.transposed = reinterpret_cast<float*>(workspace + at.scales);
    p.blocks = (g.k + 127) / 128;
    p.step = g.scale_step;
  }
  if (!masked || fp8) {
    sm90::LaunchShape shape;
    shape.grid = dim3(gpu::blocks_for(fp8 ? g.rows : 1, kTile, 4 * multiprocessors(x.device)) + (masked ? 0 : 1));
    shape.threads = kThreads;
    sm90::launch_dependent(g.q.op, x.device, stream, prepare_kernel, shape, p);
  }
  if (fp8) return grouped_gemm<bf16, Format::fp8>(g);
  g.q.type == DType::bf16 ? grouped_gemm<bf16, Format::half>(g) : grouped_gemm<f16, Format::half>(g);
}

}  // namespace backend
}  // namespace radix
