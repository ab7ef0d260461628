// MLA decode whose bits do not depend on the batch, for 16 or 32 query rows at once, and for few rows over the FP8
// cache: bound by the bytes of the cache.
//
// KV is split at fixed multiples of tokens (common/split_plan.cuh). A block owns 16 or 32 query rows and walks over
// tiles of 32 tokens, copied by all warps (cp.async, 16 bytes a lane, eight lanes a line) into rows padded by 16 bytes,
// so that ldmatrix finds every bank free, for K as for V transposed.
//
//   S   warp w: tokens 8 (w % 4) .. + 8 over half of the dimensions (w / 4), Q in registers; the halves meet in shared
//       memory, where every warp reads all of S back in the layout that P needs: the one exchange of a tile
//   PV  warp w: the 64 latent dimensions from 64 w
//
// Every warp computes the same softmax. At the barrier of tile i + 1 all warps are done with tile i, whose stage is
// then refilled with tile i + kStages: about 147 KiB are in flight at any time.
//
// Shared memory:
//
//   | ring of stages | 183 KiB     | 5 x [32 tokens, 1,168 bytes]; FP8: 8 x [32 tokens, 656 bytes], 164 KiB  |
//   | exchange       | 8 or 16 KiB | S of 8 warps, 512 bytes for each tile of 16 query rows; double-buffered |
//   | full           | 64 bytes    | a barrier for each stage                                                |
//   | plan           | 16 KiB      | the chunks of kMaxRows rows of the batch                                |
#include <type_traits>

#include "sm90/common/convert.cuh"
#include "sm90/common/cp_async.cuh"
#include "sm90/common/ldmatrix.cuh"
#include "sm90/common/mbarrier.cuh"
#include "sm90/common/mma_m16n8k16.cuh"
#include "sm90/common/mma_softmax.cuh"
#include "sm90/common/split_combine.cuh"
#include "sm90/mla/mla.cuh"

namespace radix::mla {
namespace {

using namespace sm90;
using namespace split_kv;

constexpr int kWarps = 8, kThreads = 256, kTile = 32;
static_assert(kWarps * 64 == kLatent, "a warp adds up 64 latent dimensions");
static_assert(kWarps / 2 * 8 == kTile, "half of the warps have eight tokens each of a tile");
constexpr int kScaleAt = kLatent, kRopeAt = kLatent + 16;  // bytes, in a token of the FP8 form
// What the probabilities of the FP8 form are multiplied with beside the scales, so that small ones stay normal in f16.
constexpr float kLift = 16;

// The result of a block: a thread's pieces as its accumulators lie, two tiles of 8 dimensions a piece.
template <int kTiles, bool kFp8>
struct SplitFixedLayout {
  static constexpr int kRows = 16 * kTiles, kThreads = mla::kThreads, kPieces = 8 * kTiles, kSecondPair = kFp8 ? 2 : 8;
  static constexpr int64_t kNodeBytes = int64_t{kPieces} * kThreads * (sizeof(float4) + sizeof(float2));

  __device__ static bool owns(int) { return true; }
  __device__ static int row(int i) { return i / 8 * 16 + i % 2 * 8 + threadIdx.x % 32 / 4; }
  __device__ static int dim(int i) { return threadIdx.x / 32 * 64 + i % 8 / 2 * 16 + threadIdx.x % 4 * (kFp8 ? 4 : 2); }
  __device__ static int index(int i) { return i * kThreads + threadIdx.x; }
  __device__ static void store(char* node, int i, const Piece& piece) {
    reinterpret_cast<float4*>(node)[index(i)] = piece.o;
    reinterpret_cast<float2*>(node + kPieces * kThreads * sizeof(float4))[index(i)] = {piece.m, piece.l};
  }
  __device__ static Piece load(const char* node, int i) {
    const float4 o = reinterpret_cast<const float4*>(node)[index(i)];
    const float2 ml = reinterpret_cast<const float2*>(node + kPieces * kThreads * sizeof(float4))[index(i)];
    return {o, ml.x, ml.y};
  }
};

template <class T, int kTiles_, bool kFp8_>
struct Config {
  using Q = T;
  static constexpr int kTiles = kTiles_;
  static constexpr bool kFp8 = kFp8_;
  using L = SplitFixedLayout<kTiles, kFp8>;
  static constexpr int kTokenBytes = kFp8 ? kFp8Bytes : kKey * 2;
  static constexpr int kTokenStride = kFp8 ? kFp8Bytes : kTokenBytes + 16;  // 16 more than a multiple of 128
  static constexpr int kStages = kFp8 ? 8 : 5, kStageBytes = kTile * kTokenStride;
  // Products of 16 dimensions in a half of the key. FP8: 16 latent ones in each half, the second has the rotary ones
  // too.
  static constexpr int kSteps = kFp8 ? 20 : kKey / 16 / 2;
  static constexpr int kScoreBytes = 2 * kTiles * kWarps * 512;
  static constexpr int kSharedBytes = kStages * kStageBytes + kScoreBytes + 64 + kPlanBytes;
  static_assert(kTiles == 1 || kTiles == 2, "one or two mma tiles of 16 query rows");
  static_assert(kTokenBytes % 16 == 0 && kTokenStride % 128 == 16, "rows that ldmatrix finds in different banks");
  static_assert(kStages >= 2 && kStages * 8 <= 64, "64 bytes of barriers follow the scores");
  static_assert(kStageBytes % 16 == 0 && kScoreBytes % 16 == 0);
  static_assert(kSteps % 2 == 0, "ldmatrix reads the operands of two products");
  static_assert(!kFp8 || __is_same(T, bf16), "the FP8 form is served for bf16 queries");
  static_assert(kSharedBytes <= kMaxSharedBytes);
};

// Asks for tiles in the order in which the block works on them, all threads together.
template <class C>
class TileLoader {
 public:
  __device__ TileLoader(const Args& a, const Plan& plan, uint32_t stages, uint64_t* full, int x, int x_end)
      : a_(a), plan_(plan), stages_(stages), full_(full), x_(x), x_end_(x_end), row_(plan.row_of(x)) {
    enter_chunk();
    settle();
  }

  __device__ void next() {
    if (x_ >= x_end_) return;
    const int64_t mine = (page_ * a_.p.k_page + in_page_ * a_.p.k_token) * (C::kFp8 ? 1 : 2);
    const uint32_t stage = stages_ + slot_ * C::kStageBytes;
#pragma unroll
    for (int i = 0; i < (kTile * kPieces + kThreads - 1) / kThreads; i++) {
      const int at = i * kThreads + threadIdx.x, token = at / kPieces, piece = at % kPieces;
      const char* from = static_cast<const char*>(a_.p.k) + __shfl_sync(~0u, mine, token % 32) + piece * 16;
      if (kTile * kPieces % kThreads == 0 || at < kTile * kPieces)
        cp_async_16(stage + token * C::kTokenStride + piece * 16, from, valid_ >> token & 1);
    }
    sm90::cp_async_mbarrier_arrive(full_ + slot_);
    slot_ = slot_ + 1 == C::kStages ? 0 : slot_ + 1;
    token_ += kTile;
    settle();
  }

 private:
  static constexpr int kPieces = C::kTokenBytes / 16;
  static_assert(kTile == 32);

  __device__ void enter_chunk() {
    const Chunk c = locate(plan_, x_, row_);
    token_ = c.begin, end_ = c.end;
  }
  // Moves on to a chunk with a tile left, and reads the page of this lane's token of it.
  __device__ void settle() {
    while (token_ >= end_) {
      if (++x_ >= x_end_) return;
      enter_chunk();
    }
    const int token = token_ + threadIdx.x % 32;
    const bool valid = token < end_;
    valid_ = __ballot_sync(~0u, valid);
    const int page = a_.page_shift >= 0 ? token >> a_.page_shift : token / a_.p.page_size;
    in_page_ = token - page * a_.p.page_size;
    page_ = 0;
    if (valid) page_ = a_.p.page_table[(a_.first_row + row_) * a_.p.table_row + page];
  }

  const Args& a_;
  const Plan& plan_;
  uint32_t stages_, valid_ = 0;
  uint64_t* full_;
  int x_, x_end_, row_, token_ = 0, end_ = 0, slot_ = 0, page_ = 0, in_page_ = 0;
};

// This warp's half of Q for each tile of 16 rows, as the operands of its products.
template <class C>
struct Queries {
  uint32_t at[C::kTiles][C::kSteps][4];
  float factor[C::kTiles][2];  // FP8: what Q was divided by to become f16
  RowFacts<C::kTiles> rows;

  __device__ void load(const Args& a, const QueryBlock& q, int kv_len) {
    using T = typename C::Q;
    const int g = threadIdx.x % 32 / 4, half = threadIdx.x / 128;
#pragma unroll
    for (int t = 0; t < C::kTiles; t++)
#pragma unroll
      for (int upper = 0; upper < 2; upper++) {
        const int packed = q.packed + t * 16 + upper * 8 + g, token = packed / a.group, head = packed % a.group;
        const bool valid = token < q.queries;
        const int64_t at_token = q.token + (valid ? token : 0), at_head = valid ? head : 0;
        const T* nope = static_cast<const T*>(a.p.q) + at_token * a.p.q_token + at_head * a.p.q_head;
        const T* rope = static_cast<const T*>(a.q_rope) + at_token * a.rope_token + at_head * a.rope_head;
        rows.position[t][upper] = kv_len - q.queries + token;
        rows.scale[t][upper] = a.p.scale;
        if constexpr (C::kFp8) {
          load_fp8(nope + half * (kLatent / 2), rope, valid, t, upper);
        } else {
          load_row(nope, rope - kLatent, half * C::kSteps * 16, valid, t, upper);
        }
      }
  }

 private:
  __device__ static uint32_t pair(const void* from, bool valid) {
    return valid ? *static_cast<const uint32_t*>(from) : 0;
  }
  __device__ void load_row(const typename C::Q* nope, const typename C::Q* rope, int first, bool valid, int t,
                           int upper) {
#pragma unroll
    for (int s = 0; s < C::kSteps; s++) {
      const int dim = first + s * 16 + threadIdx.x % 4 * 2;
      const auto* from = (dim < kLatent ? nope : rope) + dim;
      at[t][s][upper] = pair(from, valid);
      at[t][s][upper + 2] = pair(from + 8, valid);
    }
  }
  // Latent dimensions as f16, 4 of each 16 that go with a lane's bytes of the key; rotary ones as they are.
  __device__ void load_fp8(const typename C::Q* nope, const typename C::Q* rope, bool valid, int t, int upper) {
    const int j = threadIdx.x % 4;
    uint2 raw[16];
#pragma unroll
    for (int s = 0; s < 16; s++)
      raw[s] = valid ? *reinterpret_cast<const uint2*>(nope + s * 16 + 4 * j) : make_uint2(0, 0);
    factor[t][upper] = narrow_row(raw);
#pragma unroll
    for (int s = 0; s < 16; s++) at[t][s][upper] = raw[s].x, at[t][s][upper + 2] = raw[s].y;
#pragma unroll
    for (int s = 0; s < 4; s++) {
      at[t][16 + s][upper] = pair(rope + s * 16 + 2 * j, valid);
      at[t][16 + s][upper + 2] = pair(rope + s * 16 + 8 + 2 * j, valid);
    }
  }
};

// A warp's part of S, unsummed: half of the dimensions of 8 tokens. bf16 or f16 cache.
template <class C>
__device__ inline void part_scores(float (&part)[C::kTiles][4], const Queries<C>& q, uint32_t tokens, int half) {
  float sum[C::kTiles][2][4] = {};
  const int lane = threadIdx.x % 32;
  const uint32_t from = tokens + lane % 8 * C::kTokenStride + half * C::kSteps * 32 + lane / 8 * 16;
#pragma unroll
  for (int i = 0; i < C::kSteps / 2; i++) {
    uint32_t k[4];
    ldmatrix_x4(k, from + i * 64);
#pragma unroll
    for (int t = 0; t < C::kTiles; t++) {
      mma<typename C::Q>(sum[t][0], q.at[t][2 * i], k[0], k[1]);
      mma<typename C::Q>(sum[t][1], q.at[t][2 * i + 1], k[2], k[3]);
    }
  }
#pragma unroll
  for (int t = 0; t < C::kTiles; t++)
#pragma unroll
    for (int e = 0; e < 4; e++) part[t][e] = sum[t][0][e] + sum[t][1][e];
}

// The same for the FP8 form: a sum for each of the half's two scale groups, exact products in f16.
template <class C>
__device__ inline void part_scores_fp8(float (&part)[C::kTiles][4], const Queries<C>& q, uint32_t tokens, int half) {
  float sum[C::kTiles][2][4] = {}, rope[C::kTiles][4] = {};
  const int lane = threadIdx.x % 32;
  const uint32_t row = tokens + lane % 8 * C::kTokenStride + lane / 8 * 16;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    uint32_t k[4];
    ldmatrix_x4(k, row + half * (kLatent / 2) + i * 64);
#pragma unroll
    for (int t = 0; t < C::kTiles; t++)
#pragma unroll
      for (int w = 0; w < 4; w++)
        mma<f16>(sum[t][i / 2], q.at[t][4 * i + w], widen_e4m3_pair<false>(k[w]), widen_e4m3_pair<true>(k[w]));
  }
  if (half == 1) {
#pragma unroll
    for (int i = 0; i < 2; i++) {
      uint32_t k[4];
      ldmatrix_x4(k, row + kRopeAt + i * 64);
#pragma unroll
      for (int t = 0; t < C::kTiles; t++) {
        mma<bf16>(rope[t], q.at[t][16 + 2 * i], k[0], k[1]);
        mma<bf16>(rope[t], q.at[t][17 + 2 * i], k[2], k[3]);
      }
    }
  }
  float2 scales[2];  // of this lane's two tokens
#pragma unroll
  for (int i = 0; i < 2; i++)
    scales[i] = load_shared_float2(tokens + (lane % 4 * 2 + i) * C::kTokenStride + kScaleAt + half * 8);
#pragma unroll
  for (int t = 0; t < C::kTiles; t++)
#pragma unroll
    for (int e = 0; e < 4; e++)
      part[t][e] = q.factor[t][e / 2] * (sum[t][0][e] * scales[e % 2].x + sum[t][1][e] * scales[e % 2].y) + rope[t][e];
}

// S of a tile, complete, from every warp's part.
template <class C>
__device__ inline void make_scores(float (&s)[C::kTiles][4][4], const Queries<C>& q, uint32_t stage, float4* exchange) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t tokens = stage + warp % 4 * 8 * C::kTokenStride;
  float part[C::kTiles][4];
  if constexpr (C::kFp8) {
    part_scores_fp8<C>(part, q, tokens, warp / 4);
  } else {
    part_scores<C>(part, q, tokens, warp / 4);
  }
#pragma unroll
  for (int t = 0; t < C::kTiles; t++)
    exchange[(t * kWarps + warp) * 32 + lane] = make_float4(part[t][0], part[t][1], part[t][2], part[t][3]);
  __syncthreads();
#pragma unroll
  for (int t = 0; t < C::kTiles; t++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float4 a = exchange[(t * kWarps + i) * 32 + lane], b = exchange[(t * kWarps + i + 4) * 32 + lane];
      s[t][i][0] = a.x + b.x, s[t][i][1] = a.y + b.y, s[t][i][2] = a.z + b.z, s[t][i][3] = a.w + b.w;
    }
}

// Adds 16 tokens of V: the 64 latent dimensions of this warp. p: their probabilities as operands.
template <class C>
__device__ inline void add_values(Running<C::kTiles, 8>& run, const uint32_t (&p)[C::kTiles][4], uint32_t tokens) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const uint32_t row = tokens + lane % 16 * C::kTokenStride + lane / 16 * 16;
  if constexpr (C::kFp8) {
#pragma unroll
    for (int c = 0; c < 2; c++) {
      uint32_t v[4];
      ldmatrix_x4_trans(v, row + warp * 64 + c * 32);
#pragma unroll
      for (int i = 0; i < 2; i++) {
        // A lane has two dimensions of two tokens: paired by dimension, the even ones make a tile and the odd ones.
        const uint32_t low = __byte_perm(v[2 * i], 0, 0x3120), high = __byte_perm(v[2 * i + 1], 0, 0x3120);
#pragma unroll
        for (int t = 0; t < C::kTiles; t++) {
          mma<f16>(run.o[t][4 * c + 2 * i], p[t], widen_e4m3_pair<false>(low), widen_e4m3_pair<false>(high));
          mma<f16>(run.o[t][4 * c + 2 * i + 1], p[t], widen_e4m3_pair<true>(low), widen_e4m3_pair<true>(high));
        }
      }
    }
  } else {
#pragma unroll
    for (int c = 0; c < 4; c++) {
      uint32_t v[4];
      ldmatrix_x4_trans(v, row + warp * 128 + c * 32);
#pragma unroll
      for (int t = 0; t < C::kTiles; t++) {
        mma<typename C::Q>(run.o[t][2 * c], p[t], v[0], v[1]);
        mma<typename C::Q>(run.o[t][2 * c + 1], p[t], v[2], v[3]);
      }
    }
  }
}

// The probabilities of 16 tokens as operands; FP8: times the scales of the tokens' values that this warp adds up.
template <class C>
__device__ inline void make_operands(uint32_t (&p)[C::kTiles][4], const float (&s)[C::kTiles][4][4], int half,
                                     uint32_t tokens) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    float scale[2] = {1, 1};
    if constexpr (C::kFp8) {
#pragma unroll
      for (int k = 0; k < 2; k++)
        scale[k] = kLift * load_shared_float(tokens + (i * 8 + threadIdx.x % 4 * 2 + k) * C::kTokenStride + kScaleAt +
                                             threadIdx.x / 64 * 4);
    }
    using P = typename std::conditional<C::kFp8, f16, typename C::Q>::type;
#pragma unroll
    for (int t = 0; t < C::kTiles; t++) {
      const float(&x)[4] = s[t][2 * half + i];
      p[t][2 * i] = round_pair<P>(x[0] * scale[0], x[1] * scale[1]);
      p[t][2 * i + 1] = round_pair<P>(x[2] * scale[0], x[3] * scale[1]);
    }
  }
}

// A thread's part of the result, in pieces.
template <class C>
__device__ inline void make_state(Piece (&state)[C::L::kPieces], const Running<C::kTiles, 8>& run) {
#pragma unroll
  for (int i = 0; i < C::L::kPieces; i++) {
    const int t = i / 8, pair = i % 8 / 2, upper = i % 2;
    const float *a = run.o[t][2 * pair] + 2 * upper, *b = run.o[t][2 * pair + 1] + 2 * upper;
    const float4 o = C::kFp8 ? make_float4(a[0] / kLift, b[0] / kLift, a[1] / kLift, b[1] / kLift)
                             : make_float4(a[0], a[1], b[0], b[1]);
    state[i] = {o, run.m[t][upper], run.l[t][upper]};
  }
}

template <class C>
__global__ void __launch_bounds__(kThreads, 1) mla_decode_split_fixed_kernel(const __grid_constant__ Args a) {
  using L = typename C::L;
  extern __shared__ __align__(128) char shared[];
  float4* exchange = reinterpret_cast<float4*>(shared + C::kStages * C::kStageBytes);
  uint64_t* full = reinterpret_cast<uint64_t*>(shared + C::kStages * C::kStageBytes + C::kScoreBytes);
  const int group = blockIdx.x;
  if (threadIdx.x == 0) {
    for (int i = 0; i < C::kStages; i++) sm90::barrier_init(full + i, kThreads);
    sm90::barrier_init_fence();
  }
  sm90::pdl_wait();
  // Its barriers also show the threads the barriers just made.
  const Plan plan = make_plan<kThreads>(
      a, L::kRows, reinterpret_cast<int*>(shared + C::kStages * C::kStageBytes + C::kScoreBytes + 64));
  sm90::pdl_trigger();
  const int x_end = plan.start(group + 1, a.groups);
  int x = plan.start(group, a.groups);
  if (x >= x_end) return;

  const uint32_t stages = sm90::shared_address(shared);
  TileLoader<C> loader(a, plan, stages, full, x, x_end);
  for (int i = 0; i < C::kStages; i++) loader.next();
  char* nodes = a.nodes + int64_t{group} * nodes_of_block(a.levels) * L::kNodeBytes;
  sm90::Ring<C::kStages> ring;
  int row = plan.row_of(x), buffer = 0;
  Queries<C> queries;
  QueryBlock block{};
  Tree<L> tree;
  bool fresh = true, started = false;
#pragma unroll 1
  for (; x < x_end; x++) {
    const Chunk c = locate(plan, x, row);
    const int kv_len = plan.hi[row];
    if (fresh) {
      block = query_block(plan, c, a.group, 0, L::kRows);
      queries.load(a, block, kv_len);
      tree.begin(nodes, a.levels, c.index, block.rows);
    }
    Running<C::kTiles, 8> run;
    run.reset();
#pragma unroll 1
    for (int token = c.begin; token < c.end; token += kTile) {
      const uint32_t stage = stages + ring.index * C::kStageBytes;
      sm90::barrier_wait(full + ring.index, ring.parity);
      float s[C::kTiles][4][4];
      make_scores<C>(s, queries, stage, exchange + buffer * (C::kScoreBytes / 32));
      // Behind its barrier: the tile before has been used by all.
      if (started) loader.next();
      started = true;
      const bool masked = token + kTile > c.end || (a.p.causal && token + kTile - 1 > kv_len - block.queries);
      mask_and_scale(s, queries.rows, a.p, token, c.begin, c.end, masked);
      online_softmax(s, run);
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const uint32_t tokens = stage + half * 16 * C::kTokenStride;
        uint32_t operands[C::kTiles][4];
        make_operands<C>(operands, s, half, tokens);
        add_values<C>(run, operands, tokens);
      }
      ring.next();
      buffer ^= 1;
    }
    run.sum_lanes();
    Piece state[L::kPieces];
    make_state<C>(state, run);
    if (tree.push(state, c.index, c.count)) {
#pragma unroll
      for (int i = 0; i < L::kPieces; i++)
        if (live<L>(i, block.rows)) finish_piece<typename C::Q, L>(a, block, 0, i, state[i]);
    }
    fresh = c.index + 1 == c.count;
  }
}

template <class T, int kTiles, bool kFp8>
void launch(const Args& a, rk_stream stream) {
  using C = Config<T, kTiles, kFp8>;
  sm90::launch_dependent("mla_decode", a.p.device, stream, mla_decode_split_fixed_kernel<C>,
                         {dim3(a.groups), kThreads, C::kSharedBytes}, a);
  launch_combine<T, typename C::L>("mla_decode", a, stream);
}

}  // namespace

int64_t split_fixed_node_bytes(int tile_rows) {
  return tile_rows == 16 ? SplitFixedLayout<1, false>::kNodeBytes : SplitFixedLayout<2, false>::kNodeBytes;
}

void launch_split_fixed(const Args& a, int tile_rows, rk_stream stream) {
  if (a.p.kv_dtype == DType::u8) {
    tile_rows == 16 ? launch<bf16, 1, true>(a, stream) : launch<bf16, 2, true>(a, stream);
  } else if (a.p.dtype == DType::bf16) {
    tile_rows == 16 ? launch<bf16, 1, false>(a, stream) : launch<bf16, 2, false>(a, stream);
  } else {
    tile_rows == 16 ? launch<f16, 1, false>(a, stream) : launch<f16, 2, false>(a, stream);
  }
}

}  // namespace radix::mla
