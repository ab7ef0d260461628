// MLA decode for many query rows: bound by the tensor cores.
//
// A block owns 64 query rows; Q (72 KiB) stays in shared memory beside two tiles of 64 tokens. Two warpgroups compute,
// each all 64 rows of one half of the 512 output dimensions (128 accumulators a thread). They take turns at the scores:
// those of the even tiles are the first's, those of the odd ones the second's.
//
//   own tile     S = Q K (started before), softmax, P and the maxima to the other, O_half *= , += P V_half
//   other tile   P and the maxima from the other, O_half *= , += P V_half, then starts the scores of its own next
//
// P goes from thread to thread through shared memory: the lanes of both hold the same rows, and a lane's registers of P
// are the other's operand as they are.
//
// The third warpgroup copies.
#pragma once

#include "cuda/hopper/registers.h"
#include "cuda/hopper/wgmma.h"
#include "cuda/hopper/wgmma_registers.h"
#include "cuda/mla/combine.h"
#include "cuda/mla/producer.h"

namespace radix::mla::wide {

using attention::decode::copy_commit;
using attention::decode::copy_wait;
using attention::decode::exp2_approx;
using hopper::named_arrive;
using hopper::named_barrier;

constexpr int kRows = 64, kThreads = 384, kConsumers = 256;

struct Shared {
  char q[kBlocks * kBlockBytes];
  char tile[2][kBlocks * kBlockBytes];
  uint4 p[4][128];
  float2 m[2][128];
  uint64_t full[2][2], empty[2][2];  // of a tile's halves
  int scratch[kThreads / 32 + 2];
};
static_assert(sizeof(Shared) <= 232448);

enum Barrier { kFromFirst = 1, kFromSecond, kBoth, kOwn };

// A computing warpgroup. kSide 0: scores of even tiles, left half of O; 1: odd tiles, right half.
template <class T, int kSide>
class Consumer {
  static constexpr hopper::Operand kType = __is_same(T, bf16) ? hopper::Operand::bf16 : hopper::Operand::f16;

 public:
  __device__ Consumer(const WideArgs& a, Shared& shared)
      : a_(a),
        shared_(shared),
        thread_(threadIdx.x % 128),
        lane_(threadIdx.x % 32),
        rank_(a.cluster > 1 ? hopper::cluster_rank() : 0),
        scale_(a.p.scale * 1.4426950408889634f),
        q_(hopper::swizzled_operand(shared.q)) {
#pragma unroll
    for (int at = 0; at < 2; at++) {
      k_[at] = hopper::swizzled_operand(shared.tile[at]);
      v_[at] = hopper::transposed_operand(shared.tile[at] + kSide * kLeftBlocks * kBlockBytes, kBlockBytes);
    }
  }

  __device__ void run(Walk walk, const Place& place, int run) {
    Segment s;
    Begun begun{};
    while (walk.next(s)) {
      const int packed = s.packed + rank_ * kRows, rows = min(kRows, s.queries * a_.group - packed);
      load_queries(s, packed, rows);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int position = s.kv_len - s.queries + (packed + row(r)) / a_.group;
        limit_[r] = a_.p.causal ? min(s.kv_len, position + 1) : s.kv_len;
        m_[r] = -INFINITY, l_[r] = 0;
      }
      // Tokens that the block's first query sees, and so all of them.
      all_ = a_.p.causal ? min(s.kv_len, s.kv_len - s.queries + packed / a_.group + 1) : s.kv_len;
#pragma unroll
      for (int i = 0; i < 128; i++) o_[i] = 0;
      attend(s);
      sum_up();
      if (s.complete()) {
        store(s, packed, rows);
      } else {
        store_part(part_of<kRows>(a_, run * a_.cluster + rank_, s.first == 0), rows);
        if (s.first == 0) begun = begin(a_, s, place, run, kRows * a_.cluster);
      }
    }
    if (threadIdx.x == 0 && rank_ == 0) begun_of(a_, run) = begun;
  }

 private:
  // The rows of a thread.
  __device__ int row(int r) const { return thread_ / 32 * 16 + lane_ / 4 + 8 * r; }

  __device__ void load_queries(const Segment& s, int packed, int rows) {
    const uint32_t to = hopper::shared_address(shared_.q);
    for (int r = threadIdx.x / 32; r < kRows; r += kConsumers / 32) {
      const bool there = r < rows;
      const int at = there ? packed + r : 0, token = s.q_begin + at / a_.group, head = at % a_.group;
      const T* nope = static_cast<const T*>(a_.p.q) + token * a_.p.q_token + head * a_.p.q_head;
      const T* rope = static_cast<const T*>(a_.q_rope) + token * a_.rope_token + head * a_.rope_head;
#pragma unroll
      for (int i = 0; i < 3; i++) {
        const int piece = i * 32 + lane_;
        if (piece < kBlocks * 8)
          copy_async(to + place_of(r, piece), piece < 64 ? nope + piece * 8 : rope + (piece - 64) * 8, there);
      }
    }
    copy_commit();
    copy_wait<0>();
    hopper::fence_async_shared();
    named_barrier(kBoth, kConsumers);
  }

  // Until half `half` of buffer `at` is there.
  __device__ void wait_full(int at, int half) {
    hopper::barrier_wait(&shared_.full[at][half], use_[at]);
    if (a_.box_tokens == 0) hopper::fence_async_shared();
  }
  // This warpgroup has read its half of the buffer.
  __device__ void release(int at) {
    uint64_t* empty = &shared_.empty[at][kSide];
    if (a_.cluster > 1) {
      if (lane_ < 2) hopper::barrier_arrive_remote(empty, lane_);
    } else if (lane_ == 0) {
      hopper::barrier_arrive(empty);
    }
    use_[at] ^= 1;
  }

  // Starts S of this side's next tile.
  __device__ void start_scores() {
    // Made anew each time: kept from tile to tile, the operands' 72 descriptors would be spilled.
    uint64_t q = q_, tile = k_[kSide];
    asm volatile("" : "+l"(q), "+l"(tile));
#pragma unroll
    for (int turn = 0; turn < 2; turn++) {
      const int half = kSide ^ turn;
      wait_full(kSide, half);
      // Behind the branches of the wait, else the compiler makes one product wait for the other.
      hopper::wgmma_fence();
#pragma unroll
      for (int block = half * kLeftBlocks; block < (half ? kBlocks : kLeftBlocks); block++)
#pragma unroll
        for (int k = 0; k < 4; k++)
          hopper::Wgmma<kType, 64>::run(s_, hopper::next_k(q + block * (kBlockBytes >> 4), k),
                                        hopper::next_k(tile + block * (kBlockBytes >> 4), k),
                                        turn > 0 || k > 0 || block != half * kLeftBlocks);
    }
    hopper::wgmma_commit();
  }
  // Starts O += P V for this side's half of buffer `at`, whose first token is `token`.
  __device__ void start_output(const uint32_t (&p)[16], int at, int token, int kv_len) {
    if (at != kSide) wait_full(at, kSide);
    if (token + kTile > kv_len) clear(at, max(0, kv_len - token));
    hopper::wgmma_fence();
#pragma unroll
    for (int k = 0; k < 4; k++)
      hopper::WgmmaRegisters<kType, 256>::run(o_, p + 4 * k, hopper::advanced(v_[at], 2048 * k), 1);
    hopper::wgmma_commit();
  }
  // Zeros in place of what a page holds past the row's end: a probability of 0 does not silence a NaN.
  __device__ void clear(int at, int from) {
    const uint32_t half = hopper::shared_address(shared_.tile[at]) + kSide * kLeftBlocks * kBlockBytes;
    for (int i = from * 8 + thread_; i < kTile * 8; i += 128)
#pragma unroll
      for (int block = 0; block < kLeftBlocks; block++)
        attention::decode::store_shared(half + block * kBlockBytes + i * 16, make_uint4(0, 0, 0, 0));
    hopper::fence_async_shared();
    named_barrier(kOwn + kSide, 128);
  }

  // Scores in units of log2, what a row does not see -inf; the rows' largest.
  __device__ void shape(int token, float (&top)[2]) {
    hopper::wgmma_hold(s_);
    const bool masked = token + kTile > all_;
    const int at = token + lane_ % 4 * 2;
    top[0] = top[1] = -INFINITY;
#pragma unroll
    for (int i = 0; i < 32; i++) {
      s_[i] *= scale_;
      if (masked && at + i / 4 * 8 + i % 2 >= limit_[i / 2 % 2]) s_[i] = -INFINITY;
      top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s_[i]);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 1));
      top[r] = fmaxf(top[r], __shfl_xor_sync(~0u, top[r], 2));
    }
  }
  // s becomes exp2(s - m); its sum joins l.
  __device__ void soften() {
    const float base[2] = {m_[0] == -INFINITY ? 0.f : m_[0], m_[1] == -INFINITY ? 0.f : m_[1]};
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < 32; i++) {
      s_[i] = exp2_approx(s_[i] - base[i / 2 % 2]);
      sum[i / 2 % 2] += s_[i];
    }
    l_[0] += sum[0], l_[1] += sum[1];
  }
  __device__ void round(uint32_t (&p)[16]) {
#pragma unroll
    for (int i = 0; i < 16; i++) p[i] = pack2<T>(s_[2 * i], s_[2 * i + 1]);
  }
  // The rows' maximum grows to `top`; returns what that makes of sums so far.
  __device__ float2 raise(float2 top) {
    const float2 by = {weight(m_[0], top.x), weight(m_[1], top.y)};
    m_[0] = top.x, m_[1] = top.y;
    l_[0] *= by.x, l_[1] *= by.y;
    return by;
  }
  __device__ void rescale(float2 by) {
    hopper::wgmma_hold(o_);
    if (!__any_sync(~0u, by.x != 1.f || by.y != 1.f)) return;
#pragma unroll
    for (int i = 0; i < 128; i += 4) o_[i] *= by.x, o_[i + 1] *= by.x, o_[i + 2] *= by.y, o_[i + 3] *= by.y;
  }
  __device__ void give(const uint32_t (&p)[16]) {
#pragma unroll
    for (int i = 0; i < 4; i++) shared_.p[i][thread_] = make_uint4(p[4 * i], p[4 * i + 1], p[4 * i + 2], p[4 * i + 3]);
  }
  __device__ void take(uint32_t (&p)[16]) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint4 x = shared_.p[i][thread_];
      p[4 * i] = x.x, p[4 * i + 1] = x.y, p[4 * i + 2] = x.z, p[4 * i + 3] = x.w;
    }
  }

  // The tiles of a segment. The side's own are every other one.
  __device__ void attend(const Segment& s) {
    if constexpr (kSide == 1) {
      other(s, 0);
      if (s.tiles == 1) return;
    }
    start_scores();
    for (int t = kSide;; t += 2) {
      own(s, t);
      if (t + 1 == s.tiles) return;
      other(s, t + 1);
      if (t + 2 == s.tiles) return;
      start_scores();
    }
  }
  // A tile whose scores this side has started: softmax, P for both, this half of P V.
  __device__ void own(const Segment& s, int t) {
    const int token = (s.first + t) * kTile;
    uint32_t p[16];
    float top[2];
    hopper::wgmma_wait<0>();
    shape(token, top);
    const float2 all = {fmaxf(m_[0], top[0]), fmaxf(m_[1], top[1])};
    const float2 by = raise(all);
    soften();
    round(p);
    shared_.m[kSide][thread_] = all;
    give(p);
    named_arrive(kFromFirst + kSide, kConsumers);
    rescale(by);
    start_output(p, kSide, token, s.kv_len);
    finish(kSide);
  }
  // One of the other side's.
  __device__ void other(const Segment& s, int t) {
    uint32_t p[16];
    named_barrier(kFromFirst + 1 - kSide, kConsumers);
    const float2 by = raise(shared_.m[1 - kSide][thread_]);
    take(p);
    rescale(by);
    start_output(p, 1 - kSide, (s.first + t) * kTile, s.kv_len);
    finish(1 - kSide);
  }

  // Until all products are done; then buffer `at` is this side's no longer.
  __device__ void finish(int at) {
    hopper::wgmma_wait<0>();
    hopper::wgmma_hold(o_);
    release(at);
  }

  // l becomes the sum over both warpgroups' tiles.
  __device__ void sum_up() {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      l_[r] += __shfl_xor_sync(~0u, l_[r], 1);
      l_[r] += __shfl_xor_sync(~0u, l_[r], 2);
    }
    named_barrier(kBoth, kConsumers);  // the last maximum was read
    shared_.m[kSide][thread_] = {l_[0], l_[1]};
    named_barrier(kBoth, kConsumers);
    const float2 other = shared_.m[1 - kSide][thread_];
    l_[0] += other.x, l_[1] += other.y;
  }
  __device__ void store(const Segment& s, int packed, int rows) {
    const attention::Params& p = a_.p;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if (row(r) >= rows) continue;
      const int at = packed + row(r);
      const int64_t token = s.q_begin + at / a_.group, head = at % a_.group;
      const float by = l_[r] == 0 ? 0.f : 1.f / l_[r];
      T* out = static_cast<T*>(p.out) + token * p.out_token + head * p.out_head + kSide * 256 + lane_ % 4 * 2;
#pragma unroll
      for (int i = 0; i < 32; i++)
        *reinterpret_cast<uint32_t*>(out + i * 8) = pack2<T>(o_[4 * i + 2 * r] * by, o_[4 * i + 2 * r + 1] * by);
      if (p.lse && kSide == 0 && lane_ % 4 == 0)
        p.lse[token * p.lse_token + head * p.lse_head] = natural_log(m_[r], l_[r]);
    }
  }
  __device__ void store_part(char* part, int rows) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      if (row(r) >= rows) continue;
      float* o = part_row(part, row(r)) + kSide * 256 + lane_ % 4 * 2;
#pragma unroll
      for (int i = 0; i < 32; i++)
        *reinterpret_cast<float2*>(o + i * 8) = make_float2(o_[4 * i + 2 * r], o_[4 * i + 2 * r + 1]);
      if (kSide == 0 && lane_ % 4 == 0) part_sums<kRows>(part, row(r)) = make_float2(m_[r], l_[r]);
    }
  }

  const WideArgs& a_;
  Shared& shared_;
  int thread_, lane_, rank_;
  float scale_;
  uint64_t q_, k_[2], v_[2];
  uint32_t use_[2] = {};  // parity of a buffer's present use
  int limit_[2], all_ = 0;
  float m_[2], l_[2];
  float o_[128], s_[32];
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    mla_wide_kernel(const __grid_constant__ WideArgs a, const __grid_constant__ hopper::TensorMap map) {
  extern __shared__ __align__(1024) char raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    for (int at = 0; at < 2; at++)
      for (int half = 0; half < 2; half++) {
        hopper::barrier_init(&shared.full[at][half], a.box_tokens > 0 ? 1 : 128);
        hopper::barrier_init(&shared.empty[at][half], 4 * a.cluster);
      }
    hopper::barrier_init_fence();
  }
  const int run = blockIdx.x / a.cluster, runs = gridDim.x / a.cluster, block_rows = kRows * a.cluster;
  hopper::pdl_wait();
  const Place place = find_start<kThreads>(a, block_rows, run, runs, shared.scratch);
  if (a.cluster > 1) hopper::cluster_sync();
  hopper::pdl_trigger();
  const Walk walk(a, block_rows, place, run);
  if (threadIdx.x >= kConsumers) {
    hopper::give_registers<40>();
    Producer(a, map, shared).run(walk);
  } else {
    hopper::take_registers<232>();
    if (threadIdx.x < 128) {
      Consumer<T, 0>(a, shared).run(walk, place, run);
    } else {
      Consumer<T, 1>(a, shared).run(walk, place, run);
    }
  }
  // No block of a cluster ends while the other may still signal it.
  if (a.cluster > 1) {
    __syncwarp();
    hopper::cluster_sync();
  }
}

template <class T>
void launch(const WideArgs& a, rk_stream stream) {
  const char* op = "mla_decode";
  const int runs = kMaxRuns / a.cluster;
  const hopper::TensorMap map = a.box_tokens > 0 ? cache_map(a) : hopper::TensorMap{};
  hopper::launch_dependent(op, a.p.device, stream, mla_wide_kernel<T>,
                           {dim3(runs * a.cluster), kThreads, static_cast<int>(sizeof(Shared)), a.cluster}, a, map);
  launch_combine<T, kRows>(a, runs, stream);
}

}  // namespace radix::mla::wide
