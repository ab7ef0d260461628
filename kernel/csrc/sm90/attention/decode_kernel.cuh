// The paged decode kernel: bound by bytes, so everything serves to keep copies in flight.
//
// A warp works alone on steps of 16 tokens (FP8: 32), with a ring of kUnits units (K or V of a step) of its own that
// stays full across chunks and rows: no barrier in the loop. A unit is as many rows of head_dim values, in a swizzle by
// 16 bytes. What counts is how the copies (cp.async, 16 bytes a lane) are dealt out: eight neighbouring lanes must take
// one line of 128 bytes, else the SM's path to L2, not memory, sets the rate. So K and V go through ldmatrix, and no
// lane copies for itself. The tensor core takes 16 query rows at once: the heads of a KV head times the query tokens.
//
// At the end of a chunk the warps join their results through shared memory.
//
// Shared memory:
//
//   | rings       | 160 KiB at most | kWarps x kUnits x [kTokens, kDim], K and V alternate  |
//   | join buffer | kJoinBytes      | kWarps x 8 rows of O                                  |
//   | row_stats   | kStatsBytes     | (m, l) of each warp and row                           |
//   | plan        | kPlanBytes      | the chunks of kMaxRows rows of the batch              |
//   | queries     | kQueryBytes     | where kSharedQueries: operands of the products        |
//   | tree        | kNodeBytes      | the upper nodes of the stack of joined chunks         |
#pragma once

#include <type_traits>

#include "sm90/attention/decode.cuh"
#include "sm90/attention/decode_loader.cuh"
#include "sm90/common/convert.cuh"
#include "sm90/common/cp_async.cuh"
#include "sm90/common/ldmatrix.cuh"
#include "sm90/common/mma_m16n8k16.cuh"
#include "sm90/common/mma_softmax.cuh"
#include "sm90/common/split_combine.cuh"

namespace radix::attention::decode {

// Q: of q and out. KV: Q or e4m3. kDim: head dimension rounded up; kTiles: of 16 query rows.
template <class Q_, class KV_, int kDim_, int kTiles_>
struct Config {
  using Q = Q_;
  using KV = KV_;
  static constexpr bool kFp8 = sizeof(KV) == 1;
  static constexpr int kDim = kDim_, kTiles = kTiles_, kRows = 16 * kTiles;
  static constexpr int kWarps = kDim > 128 ? 4 : 8, kThreads = 32 * kWarps;
  static constexpr int kVec = 16 / sizeof(KV);
  static constexpr int kRowBytes = kDim * sizeof(KV), kRowPieces = kRowBytes / 16;
  static constexpr int kOut = kDim / 8;  // 16 x 8 tiles of O
  // Of a step: FP8 has instructions to spare nowhere, and a step's softmax costs the same for twice the tokens.
  static constexpr int kTokens = kFp8 && kTiles * kDim <= 128 ? 32 : 16, kGroups = kTokens / 8;
  // Page ids of a whole chunk at once: slower in FP8, and with 256 dimensions registers are short.
  static constexpr bool kPagesOfChunk = !kFp8 && kDim <= 128;
  static constexpr int kUnitBytes = kTokens * kRowBytes;
  static constexpr int kUnits = 163840 / (kWarps * kUnitBytes) < 10 ? 163840 / (kWarps * kUnitBytes) : 10;
  static constexpr int kRingBytes = kWarps * kUnits * kUnitBytes;
  static constexpr int kJoinRow = kDim + (kFp8 ? 16 : 8);  // floats; padded against bank conflicts
  static constexpr int kJoinBytes = kWarps * 8 * kJoinRow * 4;
  static constexpr int kStatsBytes = kWarps * kRows * 8;
  static constexpr int kSteps = kDim / 16;  // products of 16 dimensions
  static constexpr bool kSharedQueries = kTiles * kDim > 128;
  static constexpr int kQueryBytes = kSharedQueries ? kTiles * kSteps * 512 : 0;
  using L = Layout<kDim, kRows, kThreads>;
  static constexpr int kOtherBytes = kRingBytes + kJoinBytes + kStatsBytes + kQueryBytes + kPlanBytes;
  // The upper part of the tree's stack, where there is space; FP8 is slower with it.
  static constexpr int kNodeBytes = !kFp8 && kOtherBytes + L::kNodeBytes <= kMaxSharedBytes - 1024 ? L::kNodeBytes : 0;
  static constexpr int kSharedBytes = kOtherBytes + kNodeBytes;
  // A product with FP8 is made in f16, which holds every e4m3 exactly and Q after scaling.
  template <bool kF16, class T>
  struct Select {
    using type = T;
  };
  template <class T>
  struct Select<true, T> {
    using type = f16;
  };
  using Mma = typename Select<kFp8, Q>::type;
  static_assert(sizeof(Q) == 2 && (kFp8 || __is_same(Q, KV)), "16-bit queries over a cache of their type or FP8");
  static_assert(kDim % 64 == 0 && kDim <= kMaxVecDim, "whole lines of 128 bytes of 16-bit elements");
  static_assert(kTiles == 1 || kTiles == 2, "one or two mma tiles of 16 query rows");
  static_assert(kRows <= kMaxTileRows);
  static_assert(is_power_of_two(kWarps) && is_power_of_two(kTokens), "steps are dealt out by shifts and masks");
  static_assert(is_power_of_two(kRowPieces) && kRowPieces <= 32, "a warp copies whole rows at once");
  static_assert(kRowPieces % 4 == 0, "ldmatrix reads four pieces of a row");
  static_assert(kTokens % (32 / kRowPieces) == 0 && kTokens <= 32, "a lane knows the page of each token of a step");
  static_assert(kTokens % 16 == 0, "a product of P and V takes 16 tokens");
  static_assert(kChunkTokens % (kTokens * kWarps) == 0, "each warp has the same steps of a whole chunk");
  static_assert(kFp8 || (1 << kShortChunkLog2) % (kTokens * kWarps) == 0, "of a short row's too");
  static_assert(kUnits >= 2, "K of a step and V of it");
  static_assert(kUnitBytes % 128 == 0 && kRingBytes % 128 == 0);
  static_assert(kJoinRow % 4 == 0, "partial results are read as float4");
  static_assert(kThreads <= kMaxThreads && kSharedBytes <= kMaxSharedBytes);
};

struct Lane {
  int g, j;
};
__device__ inline Lane this_lane() {
  const int lane = threadIdx.x % 32;
  return {lane / 4, lane % 4};
}

// Q of a block of rows as operands of the tensor core, and what is applied to its scores. Where the registers do not
// hold it, it lies in shared memory, one copy for all warps.
template <class C>
class Queries {
 public:
  RowFacts<C::kTiles> rows;

  __device__ explicit Queries(uint32_t shared) : shared_(shared + threadIdx.x % 32 * 16) {}

  // By all threads of the block, after they are done with the Q before.
  __device__ void load(const Args& a, const QueryBlock& q, int kv_head, int kv_len) {
    const auto [g, j] = this_lane();
    const Params& p = a.p;
    const float k_scale = p.k_scale ? p.k_scale[p.scale_per_head ? kv_head : 0] : 1.f;
#pragma unroll
    for (int t = 0; t < C::kTiles; t++) {
      uint2 raw[2][C::kSteps];  // of the rows g and g + 8, 4 dimensions of each 16
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int packed = q.packed + t * 16 + half * 8 + g, group = a.group;
        const int token = packed / group, head = q.head + packed % group;
        const bool valid = token < q.queries;
        const auto* row = static_cast<const typename C::Q*>(p.q) + (q.token + (valid ? token : 0)) * p.q_token +
                          (valid ? head : q.head) * p.q_head;
        rows.position[t][half] = kv_len - q.queries + token;
        rows.scale[t][half] = p.scale * k_scale;
        load_row(raw[half], row, valid ? p.head_dim : 0, j);
        if constexpr (C::kFp8 && __is_same(typename C::Q, bf16)) rows.scale[t][half] *= narrow_row(raw[half]);
      }
#pragma unroll
      for (int s = 0; s < C::kSteps; s++) {
        const uint4 operand = make_uint4(raw[0][s].x, raw[1][s].x, raw[0][s].y, raw[1][s].y);
        if constexpr (C::kSharedQueries) {
          if (threadIdx.x < 32) store_shared_uint4(shared_ + (t * C::kSteps + s) * 512, operand);
        } else {
          at_[t][s] = operand;
        }
      }
    }
    if constexpr (C::kSharedQueries) __syncthreads();
  }

  // The operand of product s.
  __device__ uint4 operand(int t, int s) const {
    if constexpr (C::kSharedQueries) {
      return load_shared_uint4(shared_ + (t * C::kSteps + s) * 512);
    } else {
      return at_[t][s];
    }
  }

 private:
  // The dimensions that go with the 4 bytes of each piece of a key that this lane gets.
  __device__ static void load_row(uint2 (&raw)[C::kSteps], const typename C::Q* row, int dim, int j) {
#pragma unroll
    for (int s = 0; s < C::kSteps; s++) {
      raw[s] = make_uint2(0, 0);
      if (s * 16 >= dim) continue;
      if constexpr (C::kFp8) {
        raw[s] = *reinterpret_cast<const uint2*>(row + s * 16 + 4 * j);
      } else {
        raw[s].x = *reinterpret_cast<const uint32_t*>(row + s * 16 + 2 * j);
        raw[s].y = *reinterpret_cast<const uint32_t*>(row + s * 16 + 8 + 2 * j);
      }
    }
  }
  uint4 at_[C::kSharedQueries ? 1 : C::kTiles][C::kSharedQueries ? 1 : C::kSteps];
  uint32_t shared_;
};

template <class C>
using Scores = float[C::kTiles][C::kGroups][4];
template <class C>
using RunningOf = Running<C::kTiles, C::kOut>;

// unit: K of the step, in place for the whole warp.
template <class C>
__device__ inline void make_scores(Scores<C>& s, const Queries<C>& q, uint32_t unit) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < C::kTiles; t++)
#pragma unroll
    for (int i = 0; i < C::kGroups; i++) s[t][i][0] = s[t][i][1] = s[t][i][2] = s[t][i][3] = 0.f;
#pragma unroll
  for (int b = 0; b < C::kRowPieces / 4; b++)
#pragma unroll
    for (int i = 0; i < C::kGroups; i++) {
      uint32_t k[4];  // of 4 pieces
      ldmatrix_x4(k, unit + place_of<C>(i * 8 + lane % 8, b * 4 + lane / 8));
#pragma unroll
      for (int t = 0; t < C::kTiles; t++) {
        if constexpr (C::kFp8) {
#pragma unroll
          for (int w = 0; w < 4; w++)
            mma<typename C::Mma>(s[t][i], q.operand(t, b * 4 + w), widen_e4m3_pair<false>(k[w]),
                                 widen_e4m3_pair<true>(k[w]));
        } else {
          mma<typename C::Mma>(s[t][i], q.operand(t, b * 2), k[0], k[1]);
          mma<typename C::Mma>(s[t][i], q.operand(t, b * 2 + 1), k[2], k[3]);
        }
      }
    }
}

template <class C>
__device__ inline void add_values(RunningOf<C>& run, const Scores<C>& s, uint32_t unit) {
#pragma unroll
  for (int h = 0; h < C::kGroups / 2; h++) {  // 16 tokens of a product
    uint32_t p[C::kTiles][4];
#pragma unroll
    for (int t = 0; t < C::kTiles; t++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float(&x)[4] = s[t][2 * h + i];
        p[t][2 * i] = round_pair<typename C::Mma>(x[0], x[1]);
        p[t][2 * i + 1] = round_pair<typename C::Mma>(x[2], x[3]);
      }
    const int token = h * 16 + threadIdx.x % 16, piece = threadIdx.x % 32 / 16;
#pragma unroll
    for (int b = 0; b < C::kRowPieces / 2; b++) {
      uint32_t v[4];  // of two pieces, tokens 0 .. 7 and 8 .. 15 of each
      ldmatrix_x4_trans(v, unit + place_of<C>(token, b * 2 + piece));
      if constexpr (C::kFp8) {
#pragma unroll
        for (int i = 0; i < 2; i++) {
          // A lane has two dimensions of two tokens: paired by dimension, the even ones make a tile and the odd ones.
          const uint32_t low = __byte_perm(v[2 * i], 0, 0x3120), high = __byte_perm(v[2 * i + 1], 0, 0x3120);
#pragma unroll
          for (int t = 0; t < C::kTiles; t++) {
            mma<typename C::Mma>(run.o[t][4 * b + 2 * i], p[t], widen_e4m3_pair<false>(low),
                                 widen_e4m3_pair<false>(high));
            mma<typename C::Mma>(run.o[t][4 * b + 2 * i + 1], p[t], widen_e4m3_pair<true>(low),
                                 widen_e4m3_pair<true>(high));
          }
        }
      } else {
#pragma unroll
        for (int t = 0; t < C::kTiles; t++) {
          mma<typename C::Mma>(run.o[t][2 * b], p[t], v[0], v[1]);
          mma<typename C::Mma>(run.o[t][2 * b + 1], p[t], v[2], v[3]);
        }
      }
    }
  }
}

// A lane's part of row g (+ 8 with half) of O, into a row of the join buffer.
template <class C>
__device__ inline void store_row(float* row, const float (&o)[C::kOut][4], int j, int half) {
#pragma unroll
  for (int i = 0; i < C::kOut; i += 2) {
    const float *a = o[i] + 2 * half, *b = o[i + 1] + 2 * half;
    if constexpr (C::kFp8) {
      *reinterpret_cast<float4*>(row + i * 8 + 4 * j) = make_float4(a[0], b[0], a[1], b[1]);
    } else {
      *reinterpret_cast<float2*>(row + i * 8 + 2 * j) = make_float2(a[0], a[1]);
      *reinterpret_cast<float2*>(row + i * 8 + 8 + 2 * j) = make_float2(b[0], b[1]);
    }
  }
}

// Joins the warps' results; every thread gets its pieces. row_stats: [kWarps][kRows] of (m, l). Few rows go to one half
// of the buffer, `at` 0 or 4, and may do so while the other half, of the join before, is still read: that saves a
// barrier.
template <class C>
__device__ inline void join_warps(RunningOf<C>& run, Piece (&state)[C::L::kPieces], float* buffer, float2* row_stats,
                                  int rows, int at, bool all_read) {
  using L = typename C::L;
  const auto [g, j] = this_lane();
  const int warp = threadIdx.x / 32;
  run.sum_lanes();
#pragma unroll
  for (int pass = 0; pass < L::kPasses; pass++) {
    if (pass * 8 >= rows) break;
    const int t = pass / 2, half = pass % 2;
    if (pass > 0 || !all_read) __syncthreads();  // what was there has been read
    // Rows in use alone: the places beside them are the other half, which others may still read.
    if (j == 0 && pass * 8 + g < rows)
      row_stats[warp * C::kRows + pass * 8 + g + at] = {run.m[t][half], run.l[t][half]};
    // A warp that saw nothing of a row leaves its part as it is: nobody reads it. Scores of NaN alone leave the maximum
    // at -inf too, but a sum that is not 0.
    if (pass * 8 + g < rows && (run.m[t][half] != -INFINITY || run.l[t][half] != 0))
      store_row<C>(buffer + (warp * 8 + g + at) * C::kJoinRow, run.o[t], j, half);
#ifndef RADIX_PLANT_MISSING_BARRIER  // set by tools/sanitize.sh alone: racecheck must miss this barrier
    __syncthreads();
#endif
#pragma unroll
    for (int k = 0; k < L::kPerPass; k++) {
      const int i = pass * L::kPerPass + k;
      if (!live<L>(i, rows)) continue;
      float2 ml[C::kWarps];
      float m = -INFINITY;
#pragma unroll
      for (int w = 0; w < C::kWarps; w++) {
        ml[w] = row_stats[w * C::kRows + L::row(i) + at];
        m = fmaxf(m, ml[w].x);
      }
      Piece sum = {make_float4(0.f, 0.f, 0.f, 0.f), m, 0.f};
#pragma unroll
      for (int w = 0; w < C::kWarps; w++) {
        const float4 part =
            *reinterpret_cast<const float4*>(buffer + (w * 8 + L::row(i) % 8 + at) * C::kJoinRow + L::dim(i));
        const float share = exp2_diff(ml[w].x, m);
        const bool seen = ml[w].x != -INFINITY || ml[w].y != 0;
        if (seen) sum.l += ml[w].y * share;
        if (seen) add_scaled(sum.o, part, share);
      }
      state[i] = sum;
    }
  }
}

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1) decode_kernel(const __grid_constant__ Args a) {
  using L = typename C::L;
  extern __shared__ __align__(128) char shared[];
  const Params& p = a.p;
  const int kv_head = blockIdx.x % p.kv_heads, group = blockIdx.x / p.kv_heads;
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // tells the compiler that it is one for the warp
  float* buffer = reinterpret_cast<float*>(shared + C::kRingBytes);
  float2* row_stats = reinterpret_cast<float2*>(shared + C::kRingBytes + C::kJoinBytes);
  char* after_stats = shared + C::kRingBytes + C::kJoinBytes + C::kStatsBytes;
  sm90::pdl_wait();
  const Plan plan = make_plan<C::kThreads>(a, C::kRows, reinterpret_cast<int*>(after_stats));
  sm90::pdl_trigger();
  const int x_end = plan.start(group + 1, a.groups);
  int x = plan.start(group, a.groups);
  if (x >= x_end) return;

  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + warp * C::kUnits * C::kUnitBytes;
  Loader<C> loader(a, plan, ring, warp, kv_head, x, x_end);
#pragma unroll 1
  for (int i = 0; i < C::kUnits / 2; i++) {
    loader.template next<false>();
    loader.template next<true>();
  }
  if constexpr (C::kUnits % 2 != 0) loader.template next<false>();
  char* nodes = a.nodes + int64_t{blockIdx.x} * nodes_of_block(a.levels) * L::kNodeBytes;
  int slot = 0, row = plan.row_of(x);
  Queries<C> queries(static_cast<uint32_t>(__cvta_generic_to_shared(after_stats + kPlanBytes)));
  QueryBlock block{};
  Tree<L, C::kNodeBytes> tree(shared + C::kOtherBytes);
  bool fresh = true, few_before = false;
  int half = 0;
#pragma unroll 1
  for (; x < x_end; x++) {
    const Chunk c = locate(plan, x, row);
    if (fresh) {
      block = query_block(plan, c, a.group, kv_head, C::kRows);
      queries.load(a, block, kv_head, plan.hi[row]);
      tree.begin(nodes, a.levels, c.index, block.rows);
      fresh = false;
    }
    RunningOf<C> run;
    run.reset();
    const int first_step = c.begin / C::kTokens, kv_len = plan.hi[row];
    // The unit just used makes place for the one kUnits later.
    const auto advance = [&](auto values) {
      __syncwarp();  // all have read it
      loader.template next<decltype(values)::value != (C::kUnits % 2 != 0)>();
      slot = slot + 1 == C::kUnits ? 0 : slot + 1;
    };
#pragma unroll 1
    for (int step = first_step + (warp - first_step & C::kWarps - 1); step * C::kTokens < c.end; step += C::kWarps) {
      const int token = step * C::kTokens, last = token + C::kTokens - 1;
      Scores<C> s;
      cp_async_wait<C::kUnits - 1>();
      __syncwarp();  // every lane's copies are there
      make_scores<C>(s, queries, ring + slot * C::kUnitBytes);
      advance(std::false_type());
      const bool masked = token < c.begin || last >= c.end || (p.causal && last > kv_len - block.queries) ||
                          (p.window_left >= 0 && token < kv_len - 1 - p.window_left);
      mask_and_scale(s, queries.rows, p, token, c.begin, c.end, masked);
      online_softmax(s, run);
      cp_async_wait<C::kUnits - 1>();
      __syncwarp();
      add_values<C>(run, s, ring + slot * C::kUnitBytes);
      advance(std::true_type());
    }
    Piece state[L::kPieces];
    const bool few = block.rows <= 4;
    half ^= 4;
    join_warps<C>(run, state, buffer, row_stats, block.rows, few ? half : 0, few && few_before);
    few_before = few;
    if (tree.push(state, c.index, c.count)) finish<typename C::Q, L>(a, block, kv_head, state);
    fresh = c.index + 1 == c.count;
    if (fresh || x + 1 == x_end) tree.flush();
  }
}

template <class C>
void launch_config(const Args& a, rk_stream stream) {
  const char* op = "flash_attn_with_kvcache";
  const unsigned heads = a.p.kv_heads;
  sm90::launch_dependent(op, a.p.device, stream, decode_kernel<C>,
                         {dim3(a.groups * heads), C::kThreads, C::kSharedBytes}, a);
  launch_combine<typename C::Q, typename C::L>(op, a, stream);
}

// Up to 16 query rows, or up to 32 where the registers suffice.
template <class Q, class KV>
void launch_type(const Args& a, rk_stream stream) {
  const bool two = a.p.max_seqlen_q * a.p.group() > 16;
  if (a.p.head_dim <= 64) {
    two ? launch_config<Config<Q, KV, 64, 2>>(a, stream) : launch_config<Config<Q, KV, 64, 1>>(a, stream);
  } else if (a.p.head_dim <= 128) {
    two ? launch_config<Config<Q, KV, 128, 2>>(a, stream) : launch_config<Config<Q, KV, 128, 1>>(a, stream);
  } else {
    launch_config<Config<Q, KV, 256, 1>>(a, stream);
  }
}

template <class KV>
void launch(const Args& a, rk_stream stream) {
  if constexpr (__is_same(KV, e4m3)) {
    a.p.dtype == DType::bf16 ? launch_type<bf16, e4m3>(a, stream) : launch_type<f16, e4m3>(a, stream);
  } else {
    launch_type<KV, KV>(a, stream);
  }
}

}  // namespace radix::attention::decode
