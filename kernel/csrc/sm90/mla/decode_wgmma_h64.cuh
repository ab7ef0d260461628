// MLA decode for many query rows: bound by the tensor cores.
//
// A block has 64 query rows and keeps Q in shared memory beside two tiles of 64 tokens. Its warpgroups:
//
//   left      O(:, 0 .. 255)   = O * rescale + P(t) V(t), 128 accumulators a thread
//   right     O(:, 256 .. 511) the same
//   scorer    S(t) = Q K(t), softmax; P(t) and the factors that rescale O to shared memory
//   producer  tiles into two buffers (producer.cuh; the FP8 cache: producer_fp8.cuh)
//
// The scores of a tile are computed while the values of the one before are added, so the tensor cores have work during
// the softmax too. P lies where the rotary part of the tile's keys was, which only its scores needed.
//
// Shared memory (struct Shared), 220 KiB:
//
//   | q                | 72 KiB     | 9 blocks of 64 dimensions: [64 query rows, 128 bytes]                         |
//   | tile[0], tile[1] | 2 x 72 KiB | 9 blocks of 64 dimensions: [64 tokens, 128 bytes]; the last one later holds P |
//   | rescale, last    | 2 x 2 KiB  | factors of the rows of O, before a tile and at the end of a segment           |
//   | full, empty, ... |            | barriers                                                                      |
#pragma once

#include "sm90/common/convert.cuh"
#include "sm90/common/ldmatrix.cuh"
#include "sm90/common/setmaxnreg.cuh"
#include "sm90/common/shared_memory.cuh"
#include "sm90/common/softmax.cuh"
#include "sm90/mla/producer_fp8.cuh"
#include "sm90/mla/role.cuh"

namespace radix::mla::wgmma_h64 {

using sm90::named_barrier;
using sm90::Softmax;

constexpr int kThreads = 512;
// A maximum moves once it has grown by 2^8: P stays within f16's range, and most tiles rescale nothing.
constexpr float kSlack = 8;

// Registers of a thread, 128 on average.
template <bool kFp8>
struct Registers {
  static constexpr int kSide = 168, kScorer = 128, kProducer = 48;
};
template <>
struct Registers<true> {
  static constexpr int kSide = 160, kScorer = 96, kProducer = 96;
};

struct Shared {
  char q[kBlocks * kBlockBytes];        // in blocks of 64 dimensions: [query row][128 bytes], swizzled
  char tile[2][kBlocks * kBlockBytes];  // of two tiles: [token][128 bytes], swizzled
  float2 rescale[2][128];               // what a thread's rows of O are multiplied by before the tile
  float2 last[2][128];                  // and at the end of the segment, if the tile is its last
  uint64_t full[2][kSlices], empty[2][kSlices];
  uint64_t block_barrier;
  uint64_t p_full[2][2];      // P of the first or last half of a buffer's tokens, with `rescale` or `last`: written
  uint64_t factors_empty[2];  // and the factors read by both sides
  int scratch[kThreads / 32 + 2];
};
static_assert(sizeof(Shared) <= sm90::kMaxSharedBytes);
static_assert(offsetof(Shared, tile) % sm90::kSwizzleAtom == 0, "swizzled operands");
static_assert(kRows == sm90::kWgmmaRows, "query rows are M of the products");
static_assert(kThreads == 4 * sm90::kWarpgroup, "two sides, a scorer and a producer");

// Named barriers: each side's, the scorer's, and at kRegistersMoved the sides have the registers that others released.
enum Barrier { kSides = 1, kScorer = 3, kRegistersMoved };

// What the scorer and the sides have in common. Of its block's 64 rows a thread has row(0) and row(1).
struct Role {
  const WgmmaArgs& a;
  Shared& shared;
  int thread, lane;
  int rank;          // in the cluster: which 64 of its query rows
  uint32_t use = 0;  // bit `at`: parity of a buffer's present use

  __device__ Role(const WgmmaArgs& args, Shared& memory)
      : a(args),
        shared(memory),
        thread(threadIdx.x % 128),
        lane(threadIdx.x % 32),
        rank(args.cluster > 1 ? sm90::cluster_rank() : 0) {}

  __device__ int row(int r) const { return thread / 32 * 16 + lane / 4 + 8 * r; }
  __device__ int packed_of(const Segment& s) const { return s.packed + rank * kRows; }
  __device__ int rows_of(const Segment& s) const { return min(kRows, s.queries * a.group - packed_of(s)); }
  __device__ char* partial(const Segment& s, int run) const {
    return partial_of<kRows>(a, run * a.cluster + rank, s.begun);
  }
  __device__ char* probabilities(int at) const { return shared.tile[at] + (kBlocks - 1) * kBlockBytes; }
  // Waits until a slice of tile buffer `at` is there.
  __device__ void wait_full(int at, int slice) const {
    sm90::barrier_wait(&shared.full[at][slice], use >> at & 1);
    if (a.box_tokens == 0) sm90::fence_async_shared();
  }
};

// The warpgroup of scores and softmax.
template <class T>
class Scorer : Role {
 public:
  __device__ Scorer(const WgmmaArgs& args, Shared& memory)
      : Role(args, memory), scale_(args.p.scale * 1.4426950408889634f) {}

  __device__ void run(Walk walk, const RunStart& run_start) {
    Segment s;
    PendingBlock pending{};
    while (walk.next(s)) {
      const int packed = packed_of(s), rows = rows_of(s);
      named_barrier(kScorer, 128);  // no warp's products read the queries before any more
      load_queries<T, kRows, 4>(a, s, packed, rows, thread / 32, lane, shared.q);
      named_barrier(kScorer, 128);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int position = s.kv_len - s.queries + (packed + row(r)) / a.group;
        limit_[r] = a.p.causal ? min(s.kv_len, position + 1) : s.kv_len;
      }
      softmax_ = {};
      softmax_.base[0] = softmax_.base[1] = 0;  // read before the first maxima are settled
      // Tokens that the block's first query sees, and so all of them.
      all_ = a.p.causal ? min(s.kv_len, s.kv_len - s.queries + packed / a.group + 1) : s.kv_len;
      start(0);
      for (int t = 0;; t++) {
        const int at = t & 1, token = (s.first + t) * kTile;
        const bool last = t + 1 == s.tiles;
        sm90::barrier_wait(&shared.factors_empty[at], (use >> at & 1) ^ 1);
        sm90::wgmma_wait<0>();
        sm90::wgmma_hold(s_);
        // Two copies: behind a branch that changes scores, all of them would be moved to other registers.
        token + kTile > all_ ? online_softmax<true>(at, token, last) : online_softmax<false>(at, token, last);
        use ^= 1 << at;
        if (last) break;
        start((t + 1) & 1);
      }
      leave_sums(s, packed, rows, run_start.run);
      if (s.begun && !s.ended) pending = begin(a, s, run_start, kRows * a.cluster);
    }
    if (thread == 0 && rank == 0) pending_of(a, run_start.run) = pending;
    __syncwarp();
  }

 private:
  // Starts S of the tile in buffer `at`.
  __device__ void start(int at) {
    // Made anew each time: kept from tile to tile, the operands' 72 descriptors would be spilled.
    uint64_t q = sm90::swizzled_operand(shared.q), tile = sm90::swizzled_operand(shared.tile[0]);
    asm volatile("" : "+l"(q), "+l"(tile));
    tile = sm90::advanced(tile, at * (kBlocks * kBlockBytes));
#pragma unroll
    for (int slice = 0; slice < kSlices; slice++) {
      wait_full(at, slice);
      // Behind the branches of the wait, else the compiler makes one product wait for the other.
      sm90::wgmma_fence();
#pragma unroll
      for (int block = slice_first(slice); block < slice_last(slice); block++)
#pragma unroll
        for (int k = 0; k < 4; k++) {
          const uint64_t keys = sm90::next_k(tile + block * (kBlockBytes >> 4), k);
          sm90::Wgmma<kOperand<T>, 64>::run(s_, sm90::next_k(q + block * (kBlockBytes >> 4), k), keys,
                                            block > 0 || k > 0);
        }
    }
    sm90::wgmma_commit();
  }

  // P of the tile in buffer `at` to the two sides, a half at a time: they add the first half's values while the other's
  // exponentials are computed. The first half is computed as if no maximum moved, while that is being found out.
  template <bool kMasked>
  __device__ void online_softmax(int at, int token, bool last) {
    if constexpr (kMasked) mask(token);
    float p[16];
    probabilities_of<0>(p);
    const bool moved = softmax_.template update_max<false>(s_, scale_, 0.f, kSlack);
    if (__builtin_expect(moved, 0)) probabilities_of<0>(p);
    shared.rescale[at][thread] = moved ? make_float2(softmax_.rescale[0], softmax_.rescale[1]) : make_float2(1, 1);
    store_probabilities<0>(at, p);
    sum(p);
    probabilities_of<1>(p);
    sum(p);
    if (last) reduce_row_sum(at);
    store_probabilities<1>(at, p);
  }

  // Scores of tokens that a row does not see become -inf.
  __device__ void mask(int token) {
    const int at = token + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < 32; i++)
      if (at + i / 4 * 8 + i % 2 >= limit_[i / 2 % 2]) s_[i] = -INFINITY;
  }

  // Probabilities of half of the tokens, relative to the maxima.
  template <int kHalf>
  __device__ void probabilities_of(float (&p)[16]) const {
#pragma unroll
    for (int i = 0; i < 16; i++) p[i] = softmax_.probability(s_[16 * kHalf + i], i / 2 % 2, scale_);
  }
  __device__ void sum(const float (&p)[16]) {
    float partial[4] = {};
#pragma unroll
    for (int i = 0; i < 16; i++) partial[i % 4] += p[i];
#pragma unroll
    for (int r = 0; r < 2; r++) softmax_.row_sum[r] += partial[2 * r] + partial[2 * r + 1];
  }

  // Half of P to the two sides, with the factors that were written before.
  template <int kHalf>
  __device__ void store_probabilities(int at, const float (&p)[16]) {
    // Matrix i of four: rows 8 (i % 2), tokens 8 (i / 2); lane 8 i + r gives the address of its row r.
    const int row = thread / 32 * 16 + lane % 16;
    const uint32_t to = sm90::shared_address(probabilities(at)) + row * 128;
#pragma unroll
    for (int k = 0; k < 2; k++)
      sm90::stmatrix_x4(to + (((2 * (2 * kHalf + k) + lane / 16) ^ row % 8) << 4),
                        round_pair<T>(p[8 * k], p[8 * k + 1]), round_pair<T>(p[8 * k + 2], p[8 * k + 3]),
                        round_pair<T>(p[8 * k + 4], p[8 * k + 5]), round_pair<T>(p[8 * k + 6], p[8 * k + 7]));
    sm90::fence_async_shared();
    sm90::barrier_arrive(&shared.p_full[at][kHalf]);
  }

  // The factors of O at the end of a segment, whose last tile is in buffer `at`.
  __device__ void reduce_row_sum(int at) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      softmax_.row_sum[r] += __shfl_xor_sync(~0u, softmax_.row_sum[r], 1);
      softmax_.row_sum[r] += __shfl_xor_sync(~0u, softmax_.row_sum[r], 2);
    }
    const auto inverse = [](float sum) { return sum == 0 ? 0.f : 1.f / sum; };
    shared.last[at][thread] = {inverse(softmax_.row_sum[0]), inverse(softmax_.row_sum[1])};
  }

  __device__ void leave_sums(const Segment& s, int packed, int rows, int run) const {
    if (lane % 4 != 0) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if (row(r) >= rows) continue;
      const attention::Params& p = a.p;
      const int at = packed + row(r);
      const int64_t token = s.q_begin + at / a.group, head = at % a.group;
      const float row_max = softmax_.row_max[r] * scale_, sum = softmax_.row_sum[r];
      if (!s.complete()) {
        partial_sums<kRows>(partial(s, run), row(r)) = make_float2(row_max, sum);
      } else if (p.lse) {
        p.lse[token * p.lse_token + head * p.lse_head] = natural_log(row_max, sum);
      }
    }
  }

  float scale_;
  int limit_[2], all_ = 0;
  Softmax softmax_;
  float s_[32];
};

// The warpgroup of 256 of O's dimensions, the left ones (kSide 0) or the right ones.
template <class T, int kSide>
class Side : Role {
 public:
  __device__ Side(const WgmmaArgs& args, Shared& memory) : Role(args, memory) {}

  __device__ void run(Walk walk, const RunStart& run_start) {
    Segment s;
    while (walk.next(s)) {
#pragma unroll
      for (int i = 0; i < 128; i++) o_[i / 64][i % 64] = 0;
      float2 rescale{};
      for (int t = 0; t < s.tiles; t++) rescale = add(t & 1, (s.first + t) * kTile, s.kv_len);
      s.complete() ? store(s, rescale) : store_partial(partial(s, run_start.run), rows_of(s));
    }
    // All warps of a warpgroup arrive between two setmaxnreg.
    __syncwarp();
    named_barrier(kSides + kSide, 128);
  }

 private:
  // O += P V for the tile in buffer `at`, whose first token is `token`; returns the factors for the end of a segment.
  __device__ float2 add(int at, int token, int kv_len) {
    // Scores came of it, so once P is there this need not be waited for any more.
    wait_full(at, kSide);
    wait_full(at, kSide + 2);
    if (a.box_tokens > 0 && token + kTile > kv_len) {
      clear_tokens(shared.tile[at], kSide, max(0, kv_len - token), thread);
      named_barrier(kSides + kSide, 128);
    }
    sm90::barrier_wait(&shared.p_full[at][0], use >> at & 1);
    const float2 rescale = shared.rescale[at][thread];
    if (__any_sync(~0u, rescale.x != 1.f || rescale.y != 1.f)) {
#pragma unroll
      for (int i = 0; i < 128; i++) o_[i / 64][i % 64] *= i / 2 % 2 ? rescale.y : rescale.x;
    }
    uint64_t v = sm90::transposed_operand(shared.tile[0] + kSide * kLeftBlocks * kBlockBytes, kBlockBytes);
    uint64_t p = sm90::swizzled_operand(probabilities(0));
    asm volatile("" : "+l"(v), "+l"(p));
    v = sm90::advanced(v, at * (kBlocks * kBlockBytes)), p = sm90::advanced(p, at * (kBlocks * kBlockBytes));
    // Sixteen tokens for 128 of the dimensions.
    const auto product = [&](int half, int k) {
      sm90::WgmmaTransposed<kOperand<T>, 128, sm90::Transposed::b>::run(
          o_[half], sm90::next_k(p, k), sm90::advanced(v, 2048 * k + half * 2 * kBlockBytes));
    };
    sm90::wgmma_fence();
    product(0, 0), product(0, 1);
    sm90::barrier_wait(&shared.p_full[at][1], use >> at & 1);
    const float2 last = shared.last[at][thread];
    sm90::wgmma_fence();
    product(0, 2), product(0, 3);
    sm90::wgmma_commit();
#pragma unroll
    for (int k = 0; k < 4; k++) product(1, k);
    sm90::wgmma_commit();
    sm90::barrier_arrive(&shared.factors_empty[at]);
    sm90::wgmma_wait<1>();
    sm90::wgmma_hold(o_[0]);
    release(at, kSide);
    sm90::wgmma_wait<0>();
    sm90::wgmma_hold(o_[1]);
    release(at, kSide + 2);
    if (kSide == 0) release(at, kSlices - 1);  // P
    use ^= 1 << at;
    return last;
  }
  // This warp has read a slice of the buffer, as the scores' products have: P came after them.
  __device__ void release(int at, int slice) {
    sm90::barrier_arrive_warp(&shared.empty[at][slice], a.sharing > 1 ? 2 : 1);
  }

  __device__ void store(const Segment& s, float2 rescale) {
    const attention::Params& p = a.p;
    const int packed = packed_of(s), rows = rows_of(s);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int at = row(r) < rows ? packed + row(r) : 0;
      const int64_t token = s.q_begin + at / a.group, head = at % a.group;
      const float factor = r ? rescale.y : rescale.x;
      T* out = static_cast<T*>(p.out) + token * p.out_token + head * p.out_head + kSide * 256 + lane % 4 * 8;
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        uint32_t w[4];
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const float* o = o_[i / 16] + (i + j) % 16 * 4 + 2 * r;
          w[j] = round_pair<T>(o[0] * factor, o[1] * factor);
        }
        const uint4 piece = transpose_quad(w);
        if (row(r) < rows) *reinterpret_cast<uint4*>(out + i * 8) = piece;
      }
    }
  }
  // Word `lane % 4` of each of four pieces, for the piece `lane % 4`: lines of 64 bytes a row instead of 16.
  __device__ uint4 transpose_quad(const uint32_t (&w)[4]) const {
    const bool odd = lane & 1, upper = lane & 2;
    const uint32_t a0 = __shfl_xor_sync(~0u, odd ? w[0] : w[1], 1), a1 = __shfl_xor_sync(~0u, odd ? w[2] : w[3], 1);
    const uint2 low = odd ? make_uint2(a0, w[1]) : make_uint2(w[0], a0);
    const uint2 high = odd ? make_uint2(a1, w[3]) : make_uint2(w[2], a1);
    const uint2 away = upper ? low : high, kept = upper ? high : low;
    const uint2 got = make_uint2(__shfl_xor_sync(~0u, away.x, 2), __shfl_xor_sync(~0u, away.y, 2));
    return upper ? make_uint4(got.x, got.y, kept.x, kept.y) : make_uint4(kept.x, kept.y, got.x, got.y);
  }
  __device__ void store_partial(char* partial, int rows) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if (row(r) >= rows) continue;
      float* o = partial_row(partial, row(r)) + kSide * 256 + lane % 4 * 2;
#pragma unroll
      for (int i = 0; i < 32; i++)
        *reinterpret_cast<float2*>(o + i * 8) =
            make_float2(o_[i / 16][i % 16 * 4 + 2 * r], o_[i / 16][i % 16 * 4 + 2 * r + 1]);
    }
  }

  float o_[2][64];  // the first 128 of the dimensions and the others
};

template <class T, bool kFp8>
__global__ void __launch_bounds__(kThreads, 1)
    mla_decode_wgmma_h64_kernel(const __grid_constant__ WgmmaArgs a, const __grid_constant__ sm90::TensorMap map) {
  extern __shared__ __align__(1024) char raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    for (int at = 0; at < 2; at++)
      for (int slice = 0; slice < kSlices; slice++) {
        sm90::barrier_init(&shared.full[at][slice], a.box_tokens > 0 ? 1 : kFp8 ? 4 : 128);
        // Both sides read P, which lies in the last slice.
        sm90::barrier_init(&shared.empty[at][slice], sm90::kWarpArrivals * (slice == kSlices - 1 ? 8 : 4) * a.sharing);
      }
    for (int at = 0; at < 2; at++) {
      for (int half = 0; half < 2; half++) sm90::barrier_init(&shared.p_full[at][half], 128);
      sm90::barrier_init(&shared.factors_empty[at], 256);
    }
    sm90::barrier_init(&shared.block_barrier, kThreads);
    sm90::barrier_init_fence();
    if (a.box_tokens > 0) sm90::prefetch_tensor_map(&map);
  }
  __syncwarp();
  if (a.cluster > 1)
    sm90::cluster_arrive_relaxed();  // with the barriers; the wait is where the other block's are needed
  using R = Registers<kFp8>;
  // Threads at the barrier behind which registers that were released are claimed back.
  constexpr int kThreadsAtMove = R::kScorer < 128 ? 512 : 384;
  static_assert(128 * (2 * R::kSide + R::kScorer + R::kProducer) <= sm90::kSmRegisters);
  static_assert(!kFp8 || __is_same(T, bf16), "FP8 values are widened to bf16");
  const int block_rows = kRows * a.cluster;
  sm90::pdl_wait();
  const RunStart run_start = find_start<kThreads>(a, block_rows, shared.scratch);
  if (a.cluster > 1) sm90::cluster_wait();
  sm90::pdl_trigger();
  const Walk walk(a, block_rows, run_start);
  if (threadIdx.x >= 384) {
    sm90::setmaxnreg_dec<R::kProducer>();
    if constexpr (kFp8) {
      if (a.sharing > 1) {
        WideningProducer<1, Shared>(a, shared).run(walk);
      } else {
        WideningProducer<2, Shared>(a, shared).run(walk);
      }
    } else {
      Producer(a, map, shared).run(walk);
    }
    __syncwarp();
    named_barrier(kRegistersMoved,
                  kThreadsAtMove);  // what it released cannot be claimed back before the sides have it
    sm90::setmaxnreg_inc<128>();
  } else if (threadIdx.x >= 256) {
    if constexpr (R::kScorer < 128) {
      sm90::setmaxnreg_dec<R::kScorer>();
      Scorer<T>(a, shared).run(walk, run_start);
      named_barrier(kRegistersMoved, kThreadsAtMove);
    }
    sm90::setmaxnreg_inc<128>();
    if constexpr (R::kScorer == 128) Scorer<T>(a, shared).run(walk, run_start);
  } else {
    sm90::setmaxnreg_inc<R::kSide>();
    sm90::named_arrive(kRegistersMoved, kThreadsAtMove);
    if (threadIdx.x < 128) {
      Side<T, 0>(a, shared).run(walk, run_start);
    } else {
      Side<T, 1>(a, shared).run(walk, run_start);
    }
    sm90::setmaxnreg_dec<128>();
  }
  // A block's shared memory is there until the other one's last signal and write have come.
  __syncwarp();
  if (kFp8 && a.sharing > 1) sm90::cluster_sync_relaxed();
  if (run_start.whole) return;
  combine<T, kRows, kThreads, sizeof(Shared)>(a, run_start, raw, &shared.block_barrier);
}

template <class T, class Cache>
void launch(const WgmmaArgs& a, rk_stream stream) {
  const char* op = "mla_decode";
  const sm90::TensorMap map = a.box_tokens > 0 ? cache_map(a) : sm90::TensorMap{};
  sm90::launch_dependent(op, a.p.device, stream, mla_decode_wgmma_h64_kernel<T, __is_same(Cache, e4m3)>,
                         {dim3(blocks_of(a)), kThreads, static_cast<int>(sizeof(Shared)), a.cluster, true}, a, map);
}

}  // namespace radix::mla::wgmma_h64
