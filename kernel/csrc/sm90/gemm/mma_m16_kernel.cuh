// out[m, n] = x[m, k] * weight[n, k]^T for up to 16 tokens, on mma.sync. Bound by bytes: the weight is read once.
//
// The weight goes from memory to registers, with no shared memory and no barrier between. A sum over k may take its
// products in any order as long as x and the weight agree, so a lane's 16 contiguous bytes of a row are the operands of
// two mma steps as they come from memory: lane (g, t) of a warp reads 16 bytes of row g at byte 16 t (the weight, 8
// rows: the mma's columns) and of tokens g, g + 8 (x, from L1: the mma's rows).
//
//   block: 8 warps = teams of `team` warps. A team owns a range of row groups (8 rows each) and takes kGroups at a
//   time; its warps share k in units of 128 bytes a row: warp w takes units w, w + team, ... While unit i is multiplied
//   the loads of the next are in flight. At the end of a pass the warps add up in shared memory, in the order of the
//   warps.
//
// Shared memory: the sums of a pass alone, [warp][group][accumulator][lane], 4 to 9 KiB.
//
// The order of the additions depends on `team` alone, which follows from n and k: a token's bits do not depend on m.
#pragma once

#include <type_traits>

#include "sm90/common/limits.cuh"
#include "sm90/common/mbarrier.cuh"
#include "sm90/common/pdl.cuh"
#include "sm90/gemm/epilogue.cuh"

namespace radix::gemm {

constexpr int kMmaM16Warps = 8;
constexpr int kMmaM16Threads = kMmaM16Warps * 32;
constexpr int kUnitBytes = 128;  // of a row, a step of a warp

struct MmaM16Params {
  const char* x;
  const char* weight;
  int64_t x_step, weight_step;    // bytes between rows; multiples of 16
  int64_t x_batch, weight_batch;  // and between the matrices of a batch (grid z); their results follow each other
  int up_rows;                    // rows from a gate row to its up row (Gate::halves), else 0
  int m, n, k_bytes;              // n: rows of the weight (Gate::halves: of one half); k_bytes: multiple of 16
  int team;                       // 1, 2, 4 or 8
  bool static_weight;             // nothing in flight writes the weight: fetch before the kernel ahead has ended
  Epilogue epilogue;
};

#define RK_MMA(shape, types)                                         \
  asm volatile("mma.sync.aligned." shape ".row.col.f32." types       \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, " \
               "{%0, %1, %2, %3};"                                   \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])      \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

// d += a * b for 16 tokens, 8 rows and 32 bytes of k.
template <class T>
struct HalfMma {
  using Out = T;
  static __device__ void run(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<T, bf16>) {
      RK_MMA("m16n8k16", "bf16.bf16");
    } else {
      RK_MMA("m16n8k16", "f16.f16");
    }
  }
};
#undef RK_MMA

// The weight passes once: it need not stay in L1.
__device__ inline uint4 load_streamed(const char* p) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(p));
  return v;
}

// `kRows` times 8 rows of one unit: two halves of 64 bytes each.
template <int kRows>
struct Fragment {
  uint4 at[kRows][2];
};

// A lane's view of the work of one warp: positions that loads and stores derive from.
template <class Mma, int kGroups, int kHalves>
class MmaM16Warp {
  static_assert(kHalves == 1 || kHalves == 2, "8 or 16 tokens are the rows of mma.m16n8k16");
  static_assert(kGroups >= 1 && kGroups % 2 == 0, "with a gate, a pass takes a gate group and its up group");

 public:
  using Weight = Fragment<kGroups>;
  using Tokens = Fragment<kHalves>;

  __device__ explicit MmaM16Warp(const MmaM16Params& p)
      : p_(p),
        g_(threadIdx.x % 32 / 4),
        t_(threadIdx.x % 4),
        x_(p.x + blockIdx.z * p.x_batch),
        weight_(p.weight + blockIdx.z * p.weight_batch) {}

  // The weight row that this lane loads in group r of the pass that begins at `group`.
  __device__ int64_t row(int group, int r) const {
    if (p_.epilogue.gate == Gate::halves) return int64_t{group + r / 2} * 8 + g_ + (r % 2 ? p_.up_rows : 0);
    return int64_t{group + r} * 8 + g_;
  }
  __device__ static int groups_of(Gate gate) { return gate == Gate::halves ? kGroups / 2 : kGroups; }

  __device__ void load_weight(Weight& unit, int group, int end, int k) const {
    const bool halves = p_.epilogue.gate == Gate::halves;
    const int at = k + t_ * 16;
#pragma unroll
    for (int r = 0; r < kGroups; r++) {
      const int mine = group + (halves ? r / 2 : r);
      const bool inside = mine < end && mine * 8 + g_ < p_.n;
      const char* from = weight_ + row(group, r) * p_.weight_step + at;
#pragma unroll
      for (int h = 0; h < 2; h++)
        unit.at[r][h] = inside && at + h * 64 < p_.k_bytes ? load_streamed(from + h * 64) : uint4{};
    }
  }

  __device__ Tokens load_x(int k) const {
    Tokens x;
    const int at = k + t_ * 16;
#pragma unroll
    for (int i = 0; i < kHalves; i++) {
      const char* from = x_ + (g_ + i * 8) * p_.x_step + at;
#pragma unroll
      for (int h = 0; h < 2; h++)
        x.at[i][h] =
            g_ + i * 8 < p_.m && at + h * 64 < p_.k_bytes ? *reinterpret_cast<const uint4*>(from + h * 64) : uint4{};
    }
    return x;
  }

  __device__ static void multiply(float (&sum)[kGroups][4], const Tokens& x, const Weight& w) {
#pragma unroll
    for (int h = 0; h < 2; h++) {
      const uint4 a = x.at[0][h], b = kHalves > 1 ? x.at[kHalves - 1][h] : uint4{};
#pragma unroll
      for (int r = 0; r < kGroups; r++) Mma::run(sum[r], {a.x, b.x, a.y, b.y}, w.at[r][h].x, w.at[r][h].y);
#pragma unroll
      for (int r = 0; r < kGroups; r++) Mma::run(sum[r], {a.z, b.z, a.w, b.w}, w.at[r][h].z, w.at[r][h].w);
    }
  }

 private:
  const MmaM16Params& p_;
  const int g_, t_;
  const char *x_, *weight_;
};

// The results of one pass from the sums of a team's warps, [warp][group][2 * token half + row % 2][lane], added in the
// order of the warps. `lane` counts the team's threads.
template <class Out, int kGroups, int kHalves>
__device__ void epilogue_of_pass(const MmaM16Params& p, const float (*partials)[kGroups][2 * kHalves][32], int group,
                                 int end, int thread) {
  const Epilogue& e = p.epilogue;
  const auto sum = [&](int token, int r, int row) {
    float total = 0;
    for (int w = 0; w < p.team; w++) total += partials[w][r][token / 8 * 2 + row % 2][token % 8 * 4 + row / 2];
    return total;
  };
  const int columns = e.gate == Gate::none ? kGroups * 8 : kGroups * 4;
  const int first = e.gate == Gate::interleaved ? group * 4 : group * 8;
  const int last = min(e.gate == Gate::interleaved ? end * 4 : end * 8, e.gate == Gate::interleaved ? p.n / 2 : p.n);
  for (int i = thread; i < p.m * columns; i += p.team * 32) {
    const int token = i / columns, c = i % columns, column = first + c;
    if (column >= last) continue;
    const auto finish = [&](int r, int row_of_group, int row) {
      return finish_sum<Out>(e, sum(token, r, row_of_group), token, row);
    };
    float value;
    if (e.gate == Gate::none) {
      value = finish(c / 8, c % 8, column);
    } else if (e.gate == Gate::halves) {
      value = silu(finish(c / 8 * 2, c % 8, column));
      value *= finish(c / 8 * 2 + 1, c % 8, column + p.up_rows);
    } else {
      value = silu(finish(c / 4, c % 4 * 2, 2 * column));
      value *= finish(c / 4, c % 4 * 2 + 1, 2 * column + 1);
    }
    store_result<Out>(e, value, int64_t{blockIdx.z} * p.m + token, column);
  }
}

// A position in the walk of a warp over its passes and units.
struct Walk {
  int group, k;
  __device__ void next(int stride, int stop, int first, int step) {
    k += stride;
    if (k >= stop) {
      k = first;
      group += step;
    }
  }
};

// kDepth units are in flight while one is multiplied.
template <class Mma, int kGroups, int kHalves, int kDepth, int kMinBlocks>
__global__ void __launch_bounds__(kMmaM16Threads, kMinBlocks) mma_m16_kernel(const __grid_constant__ MmaM16Params p) {
  static_assert(kDepth >= 1, "a unit is in flight while another is multiplied");
  static_assert(kMmaM16Threads * kMinBlocks <= sm90::kSmThreads);
  static_assert(kMmaM16Warps * kGroups * 2 * kHalves * 32 * 4 <= sm90::kStaticSharedBytes, "sums of all warps");
  static_assert(1 + kMmaM16Warps <= sm90::kNamedBarriers, "a named barrier for each team");
  using Warp = MmaM16Warp<Mma, kGroups, kHalves>;
  constexpr int kRing = kDepth + 1;
  __shared__ float partials[kMmaM16Warps][kGroups][2 * kHalves][32];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int teams = kMmaM16Warps / p.team, team = warp / p.team, member = warp % p.team;
  const Warp self(p);
  sm90::pdl_trigger();
  if (!p.static_weight) sm90::pdl_wait();

  const int groups = (p.n + 7) / 8, total = gridDim.x * teams, index = blockIdx.x * teams + team;
  const int begin = static_cast<int>(int64_t{groups} * index / total);
  const int end = static_cast<int>(int64_t{groups} * (index + 1) / total);
  const int step = Warp::groups_of(p.epilogue.gate), stride = p.team * kUnitBytes, first = member * kUnitBytes;
  // Units of a pass, the same for every member and a multiple of the ring: a pass ends at one place of the code.
  const int stop = first + (p.k_bytes + stride * kRing - 1) / (stride * kRing) * kRing * stride;

  Walk ahead{begin, first};
  typename Warp::Weight units[kRing];
#pragma unroll
  for (int i = 0; i < kDepth; i++) {
    self.load_weight(units[i], ahead.group, end, ahead.k);
    ahead.next(stride, stop, first, step);
  }
  if (p.static_weight) sm90::pdl_wait();

  for (int group = begin; group < end; group += step) {
    float sum[kGroups][4] = {};
    for (int k = first; k < stop; k += kRing * stride) {
#pragma unroll
      for (int i = 0; i < kRing; i++) {
        const auto x = self.load_x(k + i * stride);
        self.load_weight(units[(i + kDepth) % kRing], ahead.group, end, ahead.k);
        ahead.next(stride, stop, first, step);
        self.multiply(sum, x, units[i]);
      }
    }
#pragma unroll
    for (int r = 0; r < kGroups; r++)
#pragma unroll
      for (int j = 0; j < 2 * kHalves; j++) partials[warp][r][j][lane] = sum[r][j];
    sm90::named_barrier(1 + team, p.team * 32);
    epilogue_of_pass<typename Mma::Out, kGroups, kHalves>(p, partials + team * p.team, group, end, member * 32 + lane);
    sm90::named_barrier(1 + team, p.team * 32);
  }
}

}  // namespace radix::gemm
