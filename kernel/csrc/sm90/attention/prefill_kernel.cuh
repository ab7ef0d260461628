// Prefill on Hopper: producer warps feed keys and values by TMA, warpgroups of 64 packed query rows consume them.
//
//   producer   K(n)  K(n-1)  K(n-2) ...     from the last block down, so that masked blocks come first;
//              V(n)  V(n-1)  V(n-2) ...     rings of kStages blocks of kBlockN keys
//   consumer   S(n)  S(n-1)  O += P(n) V(n)  S(n-2)  O += P(n-1) V(n-1) ...
//                            softmax(S(n-1)) meanwhile
//
// Scores, probabilities and the output stay in registers; probabilities are the A operand of the second product, values
// are read along their columns. Consumers are in ping-pong: they start their products one after the other, so that the
// softmax of one runs under the products of the other.
//
// Shared memory (struct Shared), at most 227 KiB:
//
//   | v               | kStages x kValueBytes            | [kBlockN, kVDim] each                                   |
//   | t               | 2 x kTransposedBytes             | FP8 alone: [kVDim, kBlockN] each                        |
//   | q               | kHeldBytes + kRests x kRestBytes | [kBlockM, kDim]: columns for registers, then the others |
//   | k               | kStages x kKeyBytes              | [kBlockN, kDim] each                                    |
//   | barriers, tiles |                                  | barriers, after what they guard; two tiles              |
//
// All operands lie in rows of 128 bytes in the 128-byte swizzle, a block of columns after the other.
//
// What names the warpgroup or counts blocks is voted on (__any_sync): so the compiler knows that it is one value for
// the warp, and builds the products' descriptors in uniform registers.
#pragma once

#include "sm90/attention/prefill_producer.cuh"
#include "sm90/common/convert.cuh"
#include "sm90/common/ldmatrix.cuh"
#include "sm90/common/math.cuh"
#include "sm90/common/setmaxnreg.cuh"
#include "sm90/common/shared_memory.cuh"
#include "sm90/common/softmax.cuh"

namespace radix::attention::prefill {

// One warpgroup.
template <class C>
class Consumer {
  using T = typename C::T;

 public:
  __device__ Consumer(const Args& a, Shared<C>& shared) : a_(a), shared_(shared), lane_(threadIdx.x % 32) {
    for (int i = 1; i < C::kConsumers; i++) group_ += __any_sync(~0u, threadIdx.x / 128 > i);
    row_ = group_ * 64 + threadIdx.x % 128 / 32 * 16 + lane_ / 4;
    // Reduced, so that the compiler holds them in uniform registers instead of making them again behind each barrier.
    k_low_ = __reduce_min_sync(~0u, operand_low(shared_.k[0]));
    v_low_ = __reduce_min_sync(~0u, values_low());
  }

  __device__ void run() {
    if (C::kPingPong && group_ == C::kConsumers - 1) named_arrive(kPingPongBarrier, 256);
    for (int i = 0;; i++) {
      barrier_wait(&shared_.q_full, i & 1);
      Tile t = shared_.tiles[i & 1];
      if (t.row < 0) return;
      rest_ = i % C::kRests;
      attend(t);
    }
  }

 private:
  static constexpr int kStepsBehindTurn = 2;  // steps behind the hand-over: see start_output
  static constexpr int kPingPongBarrier = 1, kOwnBarrier = kPingPongBarrier + C::kConsumers;  // named barriers
  static_assert(kOwnBarrier + C::kConsumers <= kNamedBarriers);

  __device__ void attend(Tile& t) {
    Softmax softmax;
    float o[C::kVDim / 2];
#pragma unroll
    for (int i = 0; i < C::kVDim / 2; i++) o[i] = 0;
    locate_rows(t);
    read_scales(t.kv_head);
    skip(t);
    if (t.n_begin < t.n_end) {
      mainloop(t, o, softmax);
    } else {
      barrier_arrive_warp(&shared_.q_empty);
    }
    epilogue(t, o, softmax);
  }

  // Describes the first block of values.
  __device__ uint32_t values_low() const {
    if constexpr (C::kFp8) {
      return operand_low(shared_.t[0]);
    } else {
      return static_cast<uint32_t>(transposed_operand(shared_.v[0], C::kBlockN * 128));
    }
  }

  // The tokens of the tile whose heads are this thread's two rows, and the keys that all rows of the tile see.
  __device__ void locate_rows(const Tile& t) {
#pragma unroll
    for (int r = 0; r < 2; r++) token_[r] = (row_ + 8 * r) / a_.p.group();
    all_end_ = end_of(t, 0);
    all_begin_ = begin_of(t, a_.tokens_per_tile - 1);
  }
  // Keys that a token of the tile sees: from begin_of to before end_of.
  __device__ int end_of(const Tile& t, int token) const {
    return a_.p.causal ? min(t.kv_len, t.kv_len - t.q_len + t.first + token + 1) : t.kv_len;
  }
  __device__ int begin_of(const Tile& t, int token) const {
    return a_.p.window_left >= 0 ? t.kv_len - t.q_len + t.first + token - a_.p.window_left : 0;
  }

  // From scores as they come out of the product to those of the softmax, and from values to outputs.
  __device__ void read_scales(int kv_head) {
    scale_ = a_.scale_log2, cap_in_ = a_.cap_in;
    if constexpr (C::kFp8) {
      const int at = a_.p.scale_per_head ? kv_head : 0;
      const float scores = a_.p.q_scale[at] * a_.p.k_scale[at];
      (a_.cap_out > 0 ? cap_in_ : scale_) *= scores;
      v_scale_ = a_.p.v_scale[at];
    }
  }

  // Passes by the blocks that only the other tile of the pair sees.
  __device__ void skip(Tile& t) {
    const int end = t.first < t.q_len ? end_of(t, a_.tokens_per_tile - 1) : 0;
    for (; __any_sync(~0u, t.n_end > t.n_begin && (t.n_end - 1) * C::kBlockN >= end); t.n_end--) {
      wait_keys();
      release_block(shared_.k_empty, k_at_);
      wait_values();
      release_values();
    }
  }

  // The last token of the tile with a row in this warpgroup.
  __device__ int last_token() const { return min(a_.tokens_per_tile - 1, (64 * group_ + 63) / a_.p.group()); }

  __device__ void mainloop(const Tile& t, float (&o)[C::kVDim / 2], Softmax& softmax) {
    float s[C::kBlockN / 2];
    uint32_t p[C::kBlockN * sizeof(T) / 8];
    uint32_t q[kHeldSteps > 0 ? 4 * kHeldSteps : 1];
    load_queries(q);
    if (kReleaseQueriesEarly) barrier_arrive_warp(&shared_.q_empty);
    int n = t.n_end - 1;
    wait_keys();
    fence_gathered();
    if (kHalves && __any_sync(~0u, n * C::kBlockN + C::kBlockN / 2 >= end_of(t, last_token()))) {
      first_block(t, n, reinterpret_cast<float(&)[kHalves ? C::kBlockN / 4 : C::kBlockN / 2]>(s), q, softmax);
#pragma unroll
      for (int i = C::kBlockN / 4; i < C::kBlockN / 2; i++) s[i] = 0;
    } else {
      first_block(t, n, s, q, softmax);
    }
    k_at_.next();
    if constexpr (!C::kFp8 && !C::kGather)
      if ((n + 1) * C::kBlockN > t.kv_len) clear_values(t.kv_len - n * C::kBlockN);
    bool moved = false;  // nothing was summed yet
    for (;; n--) {
      // Here, behind the loop's branch: in one block with the softmax the compiler would wait before it.
      wgmma_wait<0>();
      wgmma_hold(o);
      if (n + 1 < t.n_end) release_values();
      round(s, p);
      if (moved) rescale(o, softmax);
      if (n == t.n_begin) break;
      wait_keys();
      wait_values();
      fence_gathered();
      const bool masked = is_masked(n - 1);
      if (C::kPingPong) named_barrier(kPingPongBarrier + group_, 256);
      start_scores(s, q);
      start_output<C::kPingPong>(o, p);
      wgmma_wait<1>();
      wgmma_hold(s);
      release_block(shared_.k_empty, k_at_);
      cap_and_mask(t, n - 1, masked, s);
      moved = softmax.template step<C::kFp8>(s, scale_, C::kProbabilityLog2, C::kSlackLog2);
    }
    if (!kReleaseQueriesEarly) barrier_arrive_warp(&shared_.q_empty);
    wait_values();
    fence_gathered();
    start_output(o, p);
    wgmma_wait<0>();
    wgmma_hold(o);
    release_values();
  }

  // The probabilities of the first block, or of its first half where this warpgroup sees no more.
  template <int kScores>
  __device__ void first_block(const Tile& t, int n, float (&s)[kScores], const uint32_t* q, Softmax& softmax) {
    start_scores(s, q);
    wgmma_wait<0>();
    wgmma_hold(s);
    barrier_arrive_warp(&shared_.k_empty[k_at_.index], C::kCluster);
    cap_and_mask(t, n, is_masked(n), s);
    softmax.template step<C::kFp8>(s, scale_, C::kProbabilityLog2, C::kSlackLog2);
  }

  template <class Ring>
  __device__ void release_block(uint64_t* empty, Ring& ring) {
    barrier_arrive_warp(&empty[ring.index], C::kCluster);
    ring.next();
  }

  __device__ void wait_keys() { barrier_wait(&shared_.k_full[k_at_.index], k_at_.parity); }
  __device__ void wait_values() {
    if constexpr (C::kFp8) {
      barrier_wait(&shared_.t_full[v_at_.index], v_at_.parity);
    } else {
      barrier_wait(&shared_.v_full[v_at_.index], v_at_.parity);
    }
  }
  // Gathered blocks were not written by TMA (FP8's values are transposed by warps that fence).
  __device__ void fence_gathered() {
    if constexpr (C::kGather) fence_async_shared();
  }
  __device__ void release_values() {
    if constexpr (C::kFp8) {
      barrier_arrive_warp(&shared_.t_empty[v_at_.index]);
      v_at_.next();
    } else {
      release_block(shared_.v_empty, v_at_);
    }
  }

  __device__ void load_queries(uint32_t* q) {
    const int row = group_ * 64 + threadIdx.x % 128 / 32 * 16 + lane_ % 16;
#pragma unroll
    for (int step = 0; step < kHeldSteps; step++) {
      const int chunk = step % 4 * 2 + lane_ / 16;
      const uint32_t at =
          shared_address(shared_.q) + step / 4 * C::kBlockM * 128 + row * 128 + ((chunk ^ row % 8) << 4);
      ldmatrix_x4(reinterpret_cast<uint32_t(&)[4]>(q[4 * step]), at);
    }
  }

  // Of the first 2 * kScores keys of the block.
  template <int kScores>
  __device__ void start_scores(float (&s)[kScores], const uint32_t* q) {
    const uint64_t queries = swizzled_operand(shared_.q + rest_ * C::kRestBytes + group_ * 64 * 128);
    const uint64_t keys = operand_at(k_low_ + k_at_.index * (C::kKeyBytes >> 4));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      const uint64_t b = advanced(keys, step / 4 * C::kBlockN * 128 + step % 4 * 32);
      if (step < kHeldSteps) {
        WgmmaRegisters<C::kType, 2 * kScores, false>::run(s, q + 4 * step, b, step > 0);
      } else {
        const uint64_t a = advanced(queries, step / 4 * C::kBlockM * 128 + step % 4 * 32);
        Wgmma<C::kType, 2 * kScores>::run(s, a, b, step > 0);
      }
    }
    wgmma_commit();
  }

  // kPassTurn: ping-pong passes on when all but the last steps are issued, so that the next warpgroup's first
  // product is there in time.
  template <bool kPassTurn = false>
  __device__ void start_output(float (&o)[C::kVDim / 2], const uint32_t* p) {
    constexpr int kSteps = C::kBlockN * sizeof(T) / 32;
    const uint64_t values = operand_at(v_low_ + v_at_.index * ((C::kFp8 ? C::kTransposedBytes : C::kValueBytes) >> 4));
    wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; step++) {
      if (kPassTurn && step == kSteps - kStepsBehindTurn)
        named_arrive(kPingPongBarrier + (group_ + 1) % C::kConsumers, 256);
      const int at = C::kFp8 ? step / 4 * C::kVDim * 128 + step % 4 * 32 : step * 2048;
      WgmmaRegisters<C::kType, C::kVDim, !C::kFp8>::run(o, p + 4 * step, advanced(values, at), true);
    }
    wgmma_commit();
  }

  // Whether some row of the tile does not see some key of the block.
  __device__ bool is_masked(int n) const {
    const int base = n * C::kBlockN;
    return __any_sync(~0u, base + C::kBlockN > all_end_ || base < all_begin_);
  }

  // Soft cap and mask.
  template <int kScores>
  __device__ void cap_and_mask(const Tile& t, int n, bool masked, float (&s)[kScores]) {
    if (__builtin_expect(a_.cap_out > 0, 0)) {
#pragma unroll
      for (int i = 0; i < kScores; i++) s[i] = a_.cap_out * tanh_fast(s[i] * cap_in_);
    }
    if (__builtin_expect(!masked, 1)) return;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const int first = n * C::kBlockN + lane_ % 4 * 2;  // key of s[2 * r]
      const int end = end_of(t, token_[r]) - first, begin = begin_of(t, token_[r]) - first;
#pragma unroll
      for (int i = 0; i < kScores; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (2 * i + e >= end || 2 * i + e < begin) s[i + 2 * r + e] = -INFINITY;
      }
    }
  }

  __device__ static void round(const float (&s)[C::kBlockN / 2], uint32_t (&p)[C::kBlockN * sizeof(T) / 8]) {
    if constexpr (C::kFp8) {
#pragma unroll
      for (int i = 0; i < C::kBlockN / 2; i += 8)
#pragma unroll
        for (int r = 0; r < 2; r++)
          p[i / 4 + r] = round_e4m3_quad(s[i + 2 * r], s[i + 2 * r + 1], s[i + 4 + 2 * r], s[i + 4 + 2 * r + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < C::kBlockN / 4; i++) p[i] = round_pair<T>(s[2 * i], s[2 * i + 1]);
    }
  }

  __device__ static void rescale(float (&o)[C::kVDim / 2], const Softmax& softmax) {
#pragma unroll
    for (int i = 0; i < C::kVDim / 2; i++) o[i] *= softmax.rescale[i / 2 % 2];
  }

  // Copied values past the row's end may be NaN (gathered ones are 0), and 0 * NaN is NaN. Both warpgroups write the
  // same zeros.
  __device__ void clear_values(int first) {
    barrier_wait(&shared_.v_full[v_at_.index], v_at_.parity);
    char* v = shared_.v[v_at_.index];
    const int chunks = (C::kBlockN - first) * 8;
    for (int c = 0; c < C::kValueColumns; c++)
      for (int i = threadIdx.x % 128; i < chunks; i += 128)
        *reinterpret_cast<uint4*>(v + (c * C::kBlockN + first) * 128 + i * 16) = uint4{};
    fence_async_shared();
    named_barrier(kOwnBarrier + group_, 128);
  }

  __device__ void epilogue(const Tile& t, float (&o)[C::kVDim / 2], Softmax& softmax) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float sum = softmax.row_sum[r];
      sum += __shfl_xor_sync(~0u, sum, 1);
      sum += __shfl_xor_sync(~0u, sum, 2);
      const int head = t.kv_head * a_.p.group() + row_ + 8 * r - token_[r] * a_.p.group();
      const bool there = token_[r] < a_.tokens_per_tile && t.first + token_[r] < t.q_len;
      float base = softmax.row_max[r] == -INFINITY ? -INFINITY : softmax.row_max[r] * scale_ - C::kProbabilityLog2,
            factor = 1;
      if (a_.p.sinks && there) {
        const float sink = a_.p.sinks[head] * 1.4426950408889634f, larger = fmaxf(base, sink);
        factor = exp2_approx(base - larger);
        sum = sum * factor + exp2_approx(sink - larger);
        base = larger;
      }
      const bool none = sum == 0;  // NaN was there to be seen: it stays
      float inverse = none ? 0.f : factor / sum;
      if constexpr (C::kFp8) inverse *= v_scale_;
#pragma unroll
      for (int i = 0; i < C::kVDim / 2; i += 4) o[i + 2 * r] *= inverse, o[i + 2 * r + 1] *= inverse;
      const int64_t token = t.q_begin + t.first + token_[r];
      if (a_.p.lse && there && lane_ % 4 == 0)
        a_.p.lse[token * a_.p.lse_token + head * a_.p.lse_head] =
            none ? -INFINITY : (base + log2f(sum)) * 0.6931471805599453f;
      uint16_t* out = static_cast<uint16_t*>(a_.p.out) + token * a_.p.out_token + head * a_.p.out_head;
      if constexpr (!C::kFp8) {
        store_row(out, there, o, r);
      } else if (a_.p.dtype == DType::bf16) {
        store_transposed_row<bf16>(out, there, o, r);
      } else {
        store_transposed_row<f16>(out, there, o, r);
      }
    }
  }

  // Of 16 columns a lane has four neighbours (prefill_transpose.cuh). Lanes 0 and 1, 2 and 3 share 32 columns out: the
  // even one gets 8 of the first 16.
  template <class Out>
  __device__ void store_transposed_row(uint16_t* out, bool there, const float (&o)[C::kVDim / 2], int r) {
    const int c = lane_ % 4;
#pragma unroll
    for (int k = 0; k < C::kVDim / 32; k++) {
      uint32_t x[4];  // two words of the first 16 columns, two of the second
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int at = 16 * k + j / 2 * 8 + j % 2 + 2 * r;
        x[j] = round_pair<Out>(o[at], o[at + 4]);
      }
      exchange(x[0], x[2], 1, c & 1);
      exchange(x[1], x[3], 1, c & 1);
      const int column = 32 * k + c % 2 * 16 + c / 2 * 8;
      if (there && column < a_.p.v_dim) *reinterpret_cast<uint4*>(out + column) = uint4{x[0], x[1], x[2], x[3]};
    }
  }

  // A quad turns its pieces of four bytes into 16-byte chunks: lane c gets chunk 4 k + c.
  __device__ void store_row(uint16_t* out, bool there, const float (&o)[C::kVDim / 2], int r) {
    const int c = lane_ % 4;
#pragma unroll
    for (int k = 0; k < C::kVDim / 32; k++) {
      uint32_t x[4];
#pragma unroll
      for (int j = 0; j < 4; j++) x[j] = round_pair<T>(o[16 * k + 4 * j + 2 * r], o[16 * k + 4 * j + 2 * r + 1]);
      exchange(x[0], x[1], 1, c & 1);
      exchange(x[2], x[3], 1, c & 1);
      exchange(x[0], x[2], 2, c & 2);
      exchange(x[1], x[3], 2, c & 2);
      const int column = (4 * k + c) * 8;
      if (there && column < a_.p.v_dim) *reinterpret_cast<uint4*>(out + column) = uint4{x[0], x[1], x[2], x[3]};
    }
  }

  // The lower lane keeps `low` and gets the other's; the upper keeps `high`.
  __device__ static void exchange(uint32_t& low, uint32_t& high, int mask, bool upper) {
    const uint32_t other = __shfl_xor_sync(~0u, upper ? low : high, mask);
    (upper ? low : high) = other;
  }

  static constexpr int kSteps = C::kDim * sizeof(T) / 32;       // of the first product
  static constexpr int kHeldSteps = C::kHeld * sizeof(T) / 32;  // of them with queries in registers
  // No later tile's queries are written over those that this one still reads.
  static constexpr bool kReleaseQueriesEarly = kHeldSteps == kSteps || C::kRests == 2;
  static constexpr bool kHalves = C::kBlockN >= 128;  // halves of a block have products of their own

  const Args& a_;
  Shared<C>& shared_;
  int group_ = 0, lane_, row_, rest_;
  uint32_t k_low_, v_low_;  // of the descriptors of the first blocks
  float scale_, cap_in_, v_scale_;
  int token_[2];             // of this thread's rows, within the tile
  int all_begin_, all_end_;  // keys that every row of the tile sees
  Ring<C::kStages> k_at_;
  Ring<C::kFp8 ? C::kTransposedStages : C::kStages> v_at_;
};

template <class C>
__global__ void __launch_bounds__(C::kThreads, 1)
    prefill_kernel(const __grid_constant__ Args args, const __grid_constant__ TensorMap q_map,
                   const __grid_constant__ TensorMap k_map, const __grid_constant__ TensorMap v_map) {
  extern __shared__ __align__(1024) char memory[];
  Shared<C>& shared = *reinterpret_cast<Shared<C>*>(memory);
  constexpr int kArrivals = C::kGather ? 32 * C::kGatherers : C::kIssuers;  // of the producer at a block
  if (threadIdx.x == 0) {
    barrier_init(&shared.q_full, 1);
    barrier_init(&shared.q_empty, kWarpArrivals * (4 * C::kConsumers + 3));
    for (int i = 0; i < C::kStages; i++) {
      barrier_init(&shared.k_full[i], kArrivals);
      barrier_init(&shared.v_full[i], kArrivals);
      barrier_init(&shared.k_empty[i], kWarpArrivals * 4 * C::kConsumers * C::kCluster);
      barrier_init(&shared.v_empty[i], kWarpArrivals * (C::kFp8 ? 2 : 4 * C::kConsumers) * C::kCluster);
    }
    if constexpr (C::kFp8) {
      for (int i = 0; i < C::kTransposedStages; i++) {
        barrier_init(&shared.t_full[i], kWarpArrivals * 2);
        barrier_init(&shared.t_empty[i], kWarpArrivals * 4 * C::kConsumers);
      }
    }
    barrier_init_fence();
  }
  C::kCluster > 1 ? cluster_sync() : __syncthreads();
  pdl_wait();
  if (threadIdx.x < 128) {
    setmaxnreg_dec<C::kProducerRegisters>();
    Producer<C>(args, shared, &q_map, &k_map, &v_map).run();
  } else {
    setmaxnreg_inc<C::kConsumerRegisters>();
    Consumer<C>(args, shared).run();
  }
  if (C::kCluster > 1) cluster_sync();  // the others may still write here
}

}  // namespace radix::attention::prefill
