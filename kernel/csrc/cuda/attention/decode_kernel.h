// The paged decode kernel: bound by bytes, so everything serves to keep copies in flight.
//
// A warp works alone on steps of 16 tokens. Each lane copies (cp.async) just the 16-byte pieces that it will itself
// feed to the tensor core, into slots of its own: no lane waits for another, and neither K nor V needs ldmatrix or a
// swizzle. This works because the order of the dimensions within a product, and of the tokens in P V, is free:
//
//   S = Q K^T   lane (g, j) = (lane / 4, lane % 4) holds dims [kVec j, kVec j + kVec) of token g, of Q's row g likewise
//   O = P V     lane (g, j) holds dims [kVec g, +kVec) of tokens 2j, 2j + 1, 2j + 8, 2j + 9; byte permutes pair tokens
//
// A ring of kUnits units (K or V of a step) a warp stays full across chunks and rows; about 128 KiB are on the way from
// memory to an SM at any time. At the end of a chunk the warps join their results through shared memory.
#pragma once

#include "cuda/attention/decode.h"
#include "cuda/attention/decode_mma.h"
#include "cuda/attention/decode_state.h"

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
  static constexpr int kKBlocks = kDim / (4 * kVec);               // pieces of a key that a lane holds
  static constexpr int kVDim = kDim < 8 * kVec ? 8 * kVec : kDim;  // one piece for each of 8 lanes at least
  static constexpr int kVBlocks = kVDim / (8 * kVec);
  static constexpr int kOut = kVDim / 8;  // 16 x 8 tiles of O
  static constexpr int kPieces = 2 * kKBlocks > 4 * kVBlocks ? 2 * kKBlocks : 4 * kVBlocks;
  static constexpr int kUnitBytes = kPieces * 512;
  static constexpr int kUnits = 163840 / (kWarps * kUnitBytes) < 10 ? 163840 / (kWarps * kUnitBytes) : 10;
  static constexpr int kRingBytes = kWarps * kUnits * kUnitBytes;
  static constexpr int kJoinBytes = kWarps * 8 * kVDim * 4;
  static constexpr int kTopBytes = kWarps * kRows * 8;
  static constexpr int kParts = kDim / 32;  // of Q that a lane holds: 8 dimensions of each 32
  static constexpr bool kSharedQueries = kTiles * kDim > 128;
  static constexpr int kQueryBytes = kSharedQueries ? kTiles * kParts * 1024 : 0;
  static constexpr int kSharedBytes = kRingBytes + kJoinBytes + kTopBytes + kQueryBytes + kPlanBytes;
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
  using L = Layout<kVDim, kRows, kThreads>;
  static_assert(kSharedBytes <= 232448);
};

struct Lane {
  int g, j;
};
__device__ inline Lane this_lane() {
  const int lane = threadIdx.x % 32;
  return {lane / 4, lane % 4};
}

// The part of a warp that asks for memory: runs ahead of the arithmetic by kUnits units.
template <class C>
class Loader {
 public:
  __device__ Loader(const Args& a, const Plan& plan, uint32_t ring, int kv_head, int x, int x_end)
      : a_(a), plan_(plan), ring_(ring), x_(x), x_end_(x_end), row_(plan.row_of(x)) {
    k_ = static_cast<const char*>(a.p.k) + kv_head * a.p.k_head * sizeof(typename C::KV);
    v_ = static_cast<const char*>(a.p.v) + kv_head * a.p.v_head * sizeof(typename C::KV);
    enter_chunk();
    settle();
  }

  // Asks for the next unit; an empty group when there is none.
  __device__ void next() {
    if (x_ < x_end_) {
      const uint32_t to = ring_ + slot_ * C::kUnitBytes + threadIdx.x % 32 * 16;
      if (!value_) {
        copy_keys(to);
      } else {
        copy_values(to);
        step_ += C::kWarps;
        settle();
      }
      value_ = !value_;
    }
    slot_ = slot_ + 1 == C::kUnits ? 0 : slot_ + 1;
    copy_commit();
  }

 private:
  __device__ void enter_chunk() {
    const Chunk c = locate(plan_, x_, row_);
    begin_ = c.begin, end_ = c.end;
    const int first = c.begin / kStepTokens, warp = threadIdx.x / 32;
    step_ = first + (warp - first & C::kWarps - 1);
  }
  // Moves on to a chunk in which this warp has a step, and reads the page ids of that step.
  __device__ void settle() {
    while (step_ * kStepTokens >= end_) {
      if (++x_ >= x_end_) return;
      enter_chunk();
    }
    const int token = step_ * kStepTokens + threadIdx.x % kStepTokens;
    const bool valid = token >= begin_ && token < end_;
    valid_ = __ballot_sync(~0u, valid);
    const int page = a_.page_shift >= 0 ? token >> a_.page_shift : token / a_.p.page_size;
    in_page_ = token - page * a_.p.page_size;
    page_ = 0;
    if (valid) page_ = a_.p.page_table[(a_.first_row + row_) * a_.p.table_row + page];
  }
  // Where this lane's token lies, in elements.
  __device__ int64_t offset(int64_t per_page, int64_t per_token) const {
    return page_ * per_page + in_page_ * per_token;
  }
  __device__ void copy_keys(uint32_t to) {
    const auto [g, j] = this_lane();
    const int64_t mine = offset(a_.p.k_page, a_.p.k_token);
#pragma unroll
    for (int t = 0; t < 2; t++) {
      const char* from = k_ + __shfl_sync(~0u, mine, g + 8 * t) * sizeof(typename C::KV) + j * 16;
      const bool valid = valid_ >> (g + 8 * t) & 1;
#pragma unroll
      for (int b = 0; b < C::kKBlocks; b++)
        copy_async(to + (t * C::kKBlocks + b) * 512, from + b * 64, valid && (4 * b + j) * C::kVec < a_.p.head_dim);
    }
  }
  __device__ void copy_values(uint32_t to) {
    const auto [g, j] = this_lane();
    const int64_t mine = offset(a_.p.v_page, a_.p.v_token);
#pragma unroll
    for (int s = 0; s < 4; s++) {
      const int token = 2 * j + s % 2 + s / 2 * 8;
      const char* from = v_ + __shfl_sync(~0u, mine, token) * sizeof(typename C::KV) + g * 16;
      const bool valid = valid_ >> token & 1;
#pragma unroll
      for (int b = 0; b < C::kVBlocks; b++)
        copy_async(to + (s * C::kVBlocks + b) * 512, from + b * 128, valid && (8 * b + g) * C::kVec < a_.p.head_dim);
    }
  }

  const Args& a_;
  const Plan& plan_;
  const char *k_, *v_;
  uint32_t ring_, valid_ = 0;
  int x_, x_end_, row_, step_ = 0, begin_ = 0, end_ = 0, slot_ = 0;
  int page_ = 0, in_page_ = 0;
  bool value_ = false;
};

// Q of a block of rows in the order of the tensor core, and what is applied to its scores. Where the registers do not
// hold it, it lies in shared memory, one copy for all warps.
template <class C>
class Queries {
 public:
  float scale[C::kTiles][2];  // of the rows g and g + 8
  int position[C::kTiles][2];

  __device__ explicit Queries(uint32_t shared) : shared_(shared + threadIdx.x % 32 * 16) {}

  // By all threads of the block, after they are done with the Q before.
  __device__ void load(const Args& a, const QueryBlock& q, int kv_head, int kv_len) {
    const auto [g, j] = this_lane();
    const Params& p = a.p;
    const float k_scale = p.k_scale ? p.k_scale[p.scale_per_head ? kv_head : 0] : 1.f;
#pragma unroll
    for (int t = 0; t < C::kTiles; t++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int packed = q.packed + t * 16 + half * 8 + g, group = a.group;
        const int token = packed / group, head = q.head + packed % group;
        const bool valid = token < q.queries;
        const auto* row = static_cast<const typename C::Q*>(p.q) + (q.token + (valid ? token : 0)) * p.q_token +
                          (valid ? head : q.head) * p.q_head;
        position[t][half] = kv_len - q.queries + token;
        scale[t][half] = p.scale * k_scale;
        load_row(row, valid ? p.head_dim : 0, j, t, half);
      }
    if constexpr (C::kSharedQueries) __syncthreads();
  }

  // The operands of the two products over part n.
  __device__ void operands(int t, int n, uint32_t (&first)[4], uint32_t (&second)[4]) const {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      uint4 x;
      if constexpr (C::kSharedQueries) {
        x = load_shared(shared_ + place(t, n, half));
      } else {
        x = at_[t][n][half];
      }
      first[half] = x.x, first[half + 2] = x.y, second[half] = x.z, second[half + 2] = x.w;
    }
  }

 private:
  __device__ static int place(int t, int n, int half) { return ((t * C::kParts + n) * 2 + half) * 512; }

  // Parts of 8 dimensions, as they lie in the pieces of K.
  __device__ void load_row(const typename C::Q* row, int dim, int j, int t, int half) {
    uint4 raw[C::kParts];
#pragma unroll
    for (int n = 0; n < C::kParts; n++) {
      constexpr int kPerPiece = C::kVec / 8;
      const int at_dim = (4 * (n / kPerPiece) + j) * C::kVec + n % kPerPiece * 8;
      raw[n] = at_dim < dim ? *reinterpret_cast<const uint4*>(row + at_dim) : make_uint4(0, 0, 0, 0);
    }
    if constexpr (C::kFp8 && __is_same(typename C::Q, bf16)) narrow(raw, t, half);
#pragma unroll
    for (int n = 0; n < C::kParts; n++) {
      if constexpr (C::kSharedQueries) {
        if (threadIdx.x < 32) store_shared(shared_ + place(t, n, half), raw[n]);
      } else {
        at_[t][n][half] = raw[n];
      }
    }
  }
  // bf16 to f16: the row is scaled by the power of two that brings its largest element to 256 or above.
  __device__ void narrow(uint4 (&raw)[C::kParts], int t, int half) {
    const auto low = [](uint32_t x) { return __uint_as_float(x << 16); };
    const auto high = [](uint32_t x) { return __uint_as_float(x & 0xffff0000u); };
    float top = 0;
#pragma unroll
    for (int n = 0; n < C::kParts; n++)
#pragma unroll
      for (int w = 0; w < 4; w++) top = fmaxf(top, fmaxf(fabsf(low(word(raw[n], w))), fabsf(high(word(raw[n], w)))));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    // The exponent, bounded so that both factors stay normal.
    const int exponent = min(max(static_cast<int>(__float_as_uint(top) >> 23) - 127 - 8, -110), 110);
    const float down = __uint_as_float(static_cast<uint32_t>(127 - exponent) << 23);
    scale[t][half] *= __uint_as_float(static_cast<uint32_t>(127 + exponent) << 23);
    const auto both = [&](uint32_t x) { return pack2<f16>(low(x) * down, high(x) * down); };
#pragma unroll
    for (int n = 0; n < C::kParts; n++)
      raw[n] = make_uint4(both(raw[n].x), both(raw[n].y), both(raw[n].z), both(raw[n].w));
  }

  uint4 at_[C::kSharedQueries ? 1 : C::kTiles][C::kSharedQueries ? 1 : C::kParts][2];
  uint32_t shared_;
};

// A warp's running softmax. m in units of log2, l not yet summed over the lanes of a row.
template <class C>
struct Running {
  float o[C::kTiles][C::kOut][4];
  float m[C::kTiles][2], l[C::kTiles][2];

  __device__ void reset() {
#pragma unroll
    for (int t = 0; t < C::kTiles; t++) {
#pragma unroll
      for (int i = 0; i < C::kOut; i++) o[t][i][0] = o[t][i][1] = o[t][i][2] = o[t][i][3] = 0.f;
      m[t][0] = m[t][1] = -INFINITY;
      l[t][0] = l[t][1] = 0.f;
    }
  }
};

// Scores of one step: [tile][8 tokens][4], as the tensor core leaves them.
template <class C>
using Scores = float[C::kTiles][2][4];

template <class C>
__device__ inline void make_scores(Scores<C>& s, const Queries<C>& q, uint32_t keys) {
#pragma unroll
  for (int t = 0; t < C::kTiles; t++)
#pragma unroll
    for (int i = 0; i < 2; i++) s[t][i][0] = s[t][i][1] = s[t][i][2] = s[t][i][3] = 0.f;
#pragma unroll
  for (int b = 0; b < C::kKBlocks; b++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const uint4 k = load_shared(keys + (i * C::kKBlocks + b) * 512);
#pragma unroll
      for (int t = 0; t < C::kTiles; t++) {
        uint32_t first[4], second[4];
        if constexpr (C::kFp8) {
#pragma unroll
          for (int half = 0; half < 2; half++) {
            q.operands(t, 2 * b + half, first, second);
            const uint32_t low = half ? k.z : k.x, high = half ? k.w : k.y;
            mma<typename C::Mma>(s[t][i], first, widen<false>(low), widen<true>(low));
            mma<typename C::Mma>(s[t][i], second, widen<false>(high), widen<true>(high));
          }
        } else {
          q.operands(t, b, first, second);
          mma<typename C::Mma>(s[t][i], first, k.x, k.y);
          mma<typename C::Mma>(s[t][i], second, k.z, k.w);
        }
      }
    }
}

// Scales, caps and masks.
template <class C>
__device__ inline void shape_scores(Scores<C>& s, const Queries<C>& q, const Params& p, int first_token, int begin,
                                    int end, bool masked) {
  constexpr float kLog2e = 1.4426950408889634f;
  const int j = threadIdx.x % 4;
#pragma unroll
  for (int t = 0; t < C::kTiles; t++)
#pragma unroll
    for (int i = 0; i < 2; i++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float x = s[t][i][e] * q.scale[t][e / 2];
        // tanh by exp2: exact at both ends.
        if (p.softcap > 0) x = p.softcap * (1.f - 2.f / (1.f + exp2_approx(x * (2.f * kLog2e / p.softcap))));
        x *= kLog2e;
        if (masked) {
          const int token = first_token + i * 8 + 2 * j + e % 2, position = q.position[t][e / 2];
          bool seen = token >= begin && token < end;
          if (p.causal) seen &= token <= position;
          if (p.window_left >= 0) seen &= token >= position - p.window_left;
          if (!seen) x = -INFINITY;
        }
        s[t][i][e] = x;
      }
}

// s becomes exp2(s - m); the running sums follow.
template <class C>
__device__ inline void soften(Scores<C>& s, Running<C>& run) {
  float top[C::kTiles][2];
  bool raised = false;
#pragma unroll
  for (int t = 0; t < C::kTiles; t++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float x = fmaxf(fmaxf(s[t][0][2 * half], s[t][0][2 * half + 1]), fmaxf(s[t][1][2 * half], s[t][1][2 * half + 1]));
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
      x = fmaxf(x, __shfl_xor_sync(~0u, x, 2));
      top[t][half] = fmaxf(run.m[t][half], x);
      raised |= top[t][half] > run.m[t][half];
    }
  if (__any_sync(~0u, raised)) {
#pragma unroll
    for (int t = 0; t < C::kTiles; t++) {
      float shrink[2];
#pragma unroll
      for (int half = 0; half < 2; half++) {
        shrink[half] = weight(run.m[t][half], top[t][half]);
        run.l[t][half] *= shrink[half];
        run.m[t][half] = top[t][half];
      }
#pragma unroll
      for (int i = 0; i < C::kOut; i++)
#pragma unroll
        for (int e = 0; e < 4; e++) run.o[t][i][e] *= shrink[e / 2];
    }
  }
#pragma unroll
  for (int t = 0; t < C::kTiles; t++)
#pragma unroll
    for (int half = 0; half < 2; half++)
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int e = 2 * half; e < 2 * half + 2; e++) {
          s[t][i][e] = weight(s[t][i][e], run.m[t][half]);
          run.l[t][half] += s[t][i][e];
        }
}

template <class C>
__device__ inline void add_values(Running<C>& run, const Scores<C>& s, uint32_t values) {
  uint32_t p[C::kTiles][4];
#pragma unroll
  for (int t = 0; t < C::kTiles; t++)
#pragma unroll
    for (int i = 0; i < 2; i++) {
      p[t][2 * i] = pack2<typename C::Mma>(s[t][i][0], s[t][i][1]);
      p[t][2 * i + 1] = pack2<typename C::Mma>(s[t][i][2], s[t][i][3]);
    }
#pragma unroll
  for (int b = 0; b < C::kVBlocks; b++) {
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = load_shared(values + (i * C::kVBlocks + b) * 512);
#pragma unroll
    for (int w = 0; w < 4; w++) {
      if constexpr (C::kFp8) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const uint32_t low = __byte_perm(word(v[0], w), word(v[1], w), half ? 0x7362 : 0x5140);
          const uint32_t high = __byte_perm(word(v[2], w), word(v[3], w), half ? 0x7362 : 0x5140);
          const int i = b * 16 + w * 4 + half * 2;
#pragma unroll
          for (int t = 0; t < C::kTiles; t++) {
            mma<typename C::Mma>(run.o[t][i], p[t], widen<false>(low), widen<false>(high));
            mma<typename C::Mma>(run.o[t][i + 1], p[t], widen<true>(low), widen<true>(high));
          }
        }
      } else {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const uint32_t low = __byte_perm(word(v[0], w), word(v[1], w), half ? 0x7632 : 0x5410);
          const uint32_t high = __byte_perm(word(v[2], w), word(v[3], w), half ? 0x7632 : 0x5410);
#pragma unroll
          for (int t = 0; t < C::kTiles; t++) mma<typename C::Mma>(run.o[t][b * 8 + w * 2 + half], p[t], low, high);
        }
      }
    }
  }
}

// A row of the join buffer is a permutation of quads that spreads a warp's stores over the banks.
template <class C>
__device__ inline int swizzled(int row, int quad) {
  constexpr int kPerLane = C::kVec / 2;
  const int j = quad / kPerLane % 4;
  return row * (C::kVDim / 4) + (quad ^ (C::kFp8 ? j | (row & 1) << 2 : j >> 1 | (row & 1) << 1));
}

// Joins the warps' results; every thread gets its pieces. top: [kWarps][kRows] of (m, l).
template <class C>
__device__ inline void join_warps(Running<C>& run, Piece (&state)[C::L::kPieces], float4* buffer, float2* top,
                                  int rows) {
  using L = typename C::L;
  const auto [g, j] = this_lane();
  const int warp = threadIdx.x / 32;
#pragma unroll
  for (int t = 0; t < C::kTiles; t++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float& l = run.l[t][half];
      l += __shfl_xor_sync(~0u, l, 1);
      l += __shfl_xor_sync(~0u, l, 2);
    }
#pragma unroll
  for (int pass = 0; pass < L::kPasses; pass++) {
    if (pass * 8 >= rows) break;
    const int t = pass / 2, half = pass % 2;
    __syncthreads();  // the pass before has been read
    if (j == 0) top[warp * C::kRows + pass * 8 + g] = {run.m[t][half], run.l[t][half]};
    // A warp that saw nothing of a row leaves its part as it is: nobody reads it.
    if (pass * 8 + g < rows && run.m[t][half] != -INFINITY) {
#pragma unroll
      for (int b = 0; b < C::kVBlocks; b++)
#pragma unroll
        for (int q = 0; q < C::kVec / 2; q++) {
          const auto at = [&](int d) {
            return run.o[t][b * C::kVec + (4 * q + d) % C::kVec][2 * half + 4 * q / C::kVec];
          };
          const int quad = b * 2 * C::kVec + j * (C::kVec / 2) + q;
          buffer[warp * 2 * C::kVDim + swizzled<C>(g, quad)] = make_float4(at(0), at(1), at(2), at(3));
        }
    }
    __syncthreads();
#pragma unroll
    for (int k = 0; k < L::kPerPass; k++) {
      const int i = pass * L::kPerPass + k;
      if (!live<L>(i, rows)) continue;
      float2 ml[C::kWarps];
      float m = -INFINITY;
#pragma unroll
      for (int w = 0; w < C::kWarps; w++) {
        ml[w] = top[w * C::kRows + L::row(i)];
        m = fmaxf(m, ml[w].x);
      }
      Piece sum = {make_float4(0.f, 0.f, 0.f, 0.f), m, 0.f};
#pragma unroll
      for (int w = 0; w < C::kWarps; w++) {
        if (ml[w].x == -INFINITY) continue;
        const float share = weight(ml[w].x, m);
        sum.l += ml[w].y * share;
        add_scaled(sum.o, buffer[w * 2 * C::kVDim + swizzled<C>(L::row(i) % 8, L::quad(i))], share);
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
  const int kv_head = blockIdx.x % p.kv_heads, group = blockIdx.x / p.kv_heads, warp = threadIdx.x / 32;
  float4* buffer = reinterpret_cast<float4*>(shared + C::kRingBytes);
  float2* top = reinterpret_cast<float2*>(shared + C::kRingBytes + C::kJoinBytes);
  char* after_top = shared + C::kRingBytes + C::kJoinBytes + C::kTopBytes;
  hopper::pdl_wait();
  const Plan plan = make_plan<C::kThreads>(a, C::kRows, reinterpret_cast<int*>(after_top));
  hopper::pdl_trigger();
  const int x_end = plan.start(group + 1, a.groups);
  int x = plan.start(group, a.groups);
  if (x >= x_end) return;

  const uint32_t ring = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + warp * C::kUnits * C::kUnitBytes;
  Loader<C> loader(a, plan, ring, kv_head, x, x_end);
#pragma unroll 1
  for (int i = 0; i < C::kUnits; i++) loader.next();
  char* nodes = a.nodes + int64_t{blockIdx.x} * nodes_of_block(a.levels) * L::kNodeBytes;
  const uint32_t mine = ring + threadIdx.x % 32 * 16;
  int slot = 0, row = plan.row_of(x);
  Queries<C> queries(static_cast<uint32_t>(__cvta_generic_to_shared(after_top + kPlanBytes)));
  QueryBlock block{};
  Tree<L> tree;
  bool fresh = true;
#pragma unroll 1
  for (; x < x_end; x++) {
    const Chunk c = locate(plan, x, row);
    if (fresh) {
      block = query_block(plan, c, a.group, kv_head, C::kRows);
      queries.load(a, block, kv_head, plan.hi[row]);
      tree.begin(nodes, a.levels, c.index, block.rows);
      fresh = false;
    }
    Running<C> run;
    run.reset();
    const int first_step = c.begin / kStepTokens, kv_len = plan.hi[row];
    const auto advance = [&] {
      loader.next();
      slot = slot + 1 == C::kUnits ? 0 : slot + 1;
    };
#pragma unroll 1
    for (int step = first_step + (warp - first_step & C::kWarps - 1); step * kStepTokens < c.end; step += C::kWarps) {
      const int token = step * kStepTokens, last = token + kStepTokens - 1;
      Scores<C> s;
      copy_wait<C::kUnits - 1>();
      make_scores<C>(s, queries, mine + slot * C::kUnitBytes);
      advance();
      const bool masked = token < c.begin || last >= c.end || (p.causal && last > kv_len - block.queries) ||
                          (p.window_left >= 0 && token < kv_len - 1 - p.window_left);
      shape_scores<C>(s, queries, p, token, c.begin, c.end, masked);
      soften<C>(s, run);
      copy_wait<C::kUnits - 1>();
      add_values<C>(run, s, mine + slot * C::kUnitBytes);
      advance();
    }
    Piece state[L::kPieces];
    join_warps<C>(run, state, buffer, top, block.rows);
    if (tree.push(state, c.index, c.count)) finish<typename C::Q, L>(a, block, kv_head, state);
    fresh = c.index + 1 == c.count;
  }
}

// Joins the nodes of a row that several blocks worked on. Block (border - 1, KV head, pieces): of the borders between
// runs that cut a row, its first is responsible.
template <class C>
__global__ void __launch_bounds__(C::kThreads) combine_kernel(const __grid_constant__ Args a) {
  using L = typename C::L;
  extern __shared__ __align__(128) char shared[];
  const Params& p = a.p;
  const int border = blockIdx.x + 1, kv_head = blockIdx.y;
  const Plan plan = make_plan<C::kThreads>(a, C::kRows, reinterpret_cast<int*>(shared));
  const int x = plan.start(border, a.groups);
  // Every block waits: when this grid has ended, the one before must have ended too.
  hopper::pdl_wait();
  if (x >= plan.total()) return;
  int row = plan.row_of(x);
  const Chunk c = locate(plan, x, row);
  const int from = x - c.index;
  if (c.index == 0 || plan.start(border - 1, a.groups) > from) return;
  const QueryBlock block = query_block(plan, c, a.group, kv_head, C::kRows);

  float4* stack_o = reinterpret_cast<float4*>(shared + kPlanBytes) + threadIdx.x;
  float2* stack_ml = reinterpret_cast<float2*>(shared + kPlanBytes + a.levels * C::kThreads * 16) + threadIdx.x;
#pragma unroll 1
  for (int i = 0; i < L::kPieces; i++) {
    if (!live<L>(i, block.rows)) continue;
    int depth = 0;
    const auto pop_join = [&](Piece right) {
      depth--;
      const float2 ml = stack_ml[depth * C::kThreads];
      return join({stack_o[depth * C::kThreads], ml.x, ml.y}, right);
    };
    constexpr int kAhead = 8;  // nodes asked for at once
    Piece ahead[kAhead];
    int first[kAhead], width[kAhead], filled = 0;
    const auto drain = [&] {
#pragma unroll
      for (int n = 0; n < kAhead; n++) {
        if (n >= filled) break;
        Piece node = ahead[n];
        int at = first[n], w = width[n];
        while (at & w) {
          node = pop_join(node);
          at -= w;
          w *= 2;
        }
        stack_o[depth * C::kThreads] = node.o;
        stack_ml[depth * C::kThreads] = {node.m, node.l};
        depth++;
      }
      filled = 0;
    };
    int at = 0, slot = 0, run = border - 1, end = 0;
    const char* nodes = nullptr;
    // The nodes of a run [at, end) are its largest aligned powers of two, from the left.
    while (at < c.count) {
#pragma unroll
      for (int n = 0; n < kAhead; n++) {
        if (at >= c.count) break;
        while (at >= end) {
          nodes = a.nodes + (int64_t{run} * p.kv_heads + kv_head) * nodes_of_block(a.levels) * L::kNodeBytes +
                  (at > 0 ? 0 : 2 * a.levels * L::kNodeBytes);
          end = min(plan.start(++run, a.groups) - from, c.count);
          slot = 0;
        }
        const int fits = 1 << (31 - __clz(end - at));
        width[n] = at == 0 ? fits : min(fits, at & -at);
        first[n] = at;
        ahead[n] = L::load(nodes + slot++ * L::kNodeBytes, i);
        at += width[n];
        filled = n + 1;
      }
      drain();
    }
    depth--;
    const float2 ml = stack_ml[depth * C::kThreads];
    Piece sum = {stack_o[depth * C::kThreads], ml.x, ml.y};
    while (depth > 0) sum = pop_join(sum);
    finish_piece<typename C::Q, L>(a, block, kv_head, i, sum);
  }
}

template <class C>
void launch_config(const Args& a, rk_stream stream) {
  const char* op = "flash_attn_with_kvcache";
  const unsigned heads = a.p.kv_heads;
  hopper::launch_dependent(op, a.p.device, stream, decode_kernel<C>,
                           {dim3(a.groups * heads), C::kThreads, C::kSharedBytes}, a);
  if (a.levels > 1 && a.groups > 1)
    hopper::launch_dependent(op, a.p.device, stream, combine_kernel<C>,
                             {dim3(a.groups - 1, heads), C::kThreads, kPlanBytes + a.levels * C::kThreads * 24}, a);
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

}  // namespace radix::attention::decode
