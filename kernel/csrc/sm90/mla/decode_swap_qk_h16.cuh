// MLA decode for up to 16 query rows: bound by the bytes of the cache. Two warpgroups compute and one copies, as
// swap_qk_h16_side.cuh has it.
//
// Shared memory (struct Shared), 224 KiB:
//
//   | Operands         | 184 KiB    | queries, tiles, probabilities and their barriers (swap_qk_h16_side.cuh) |
//   | other            | 2 x 20 KiB | O, m and l of the other half of a run, double-buffered                  |
//   | exchange_full .. |            | barriers                                                                |
#pragma once

#include "sm90/mla/swap_qk_h16_side.cuh"

namespace radix::mla::swap_qk_h16 {

struct Shared : Operands {
  float4 other[2][10][128];  // of a run's other half: O, m, l; double-buffered
  uint64_t exchange_full[2], block_barrier;
  int scratch[kThreads / 32 + 2];
};
static_assert(sizeof(Shared) <= sm90::kMaxSharedBytes);

// A consumer warpgroup.
template <class T, int kSide>
class Consumer : Side<T, kSide> {
  using Base = Side<T, kSide>;
  using Base::a_;
  using Base::attend;
  using Base::column;
  using Base::dim;
  using Base::l_;
  using Base::lane_;
  using Base::m_;
  using Base::o_;
  using Base::thread_;
  using Base::warp_;
  using Base::which;

 public:
  __device__ Consumer(const WgmmaArgs& a, Shared& shared, const RunStart& run_start)
      : Base(a, shared), shared_(shared), run_start_(run_start) {}

  __device__ void run(Walk walk) {
    Segment s;
    PendingBlock pending{};
    while (walk.next(s)) {
      const int rows = min(kRows, s.queries * a_.group - s.packed);
      attend(s, rows);
      if (s.halved) join_halves();
      if (!s.halved || kSide == run_start_.half) {
        s.complete() ? store(s, rows) : store_partial(partial_of<kRows>(a_, run_start_.run, s.begun), rows);
      }
      if (s.begun && !s.ended) pending = begin(a_, s, run_start_, kRows);
    }
    if (threadIdx.x == 0 && run_start_.half == 0) pending_of(a_, run_start_.run) = pending;
  }

 private:
  // The two halves of a run join: the left dimensions in the first block, the right ones in the second.
  __device__ void join_halves() {
    const int at = exchanges_ & 1;
    if (kSide != run_start_.half) {
      const uint32_t to = sm90::remote_address(&shared_.other[at][0][thread_], kSide);
      const uint32_t exchange_full = sm90::remote_address(&shared_.exchange_full[at], kSide);
#pragma unroll
      for (int b = 0; b < 4; b++)
#pragma unroll
        for (int i = 0; i < 2; i++) send_floats(to + (2 * b + i) * 2048, o_[b] + 4 * i, exchange_full);
      send_floats(to + 8 * 2048, m_, exchange_full);
      send_floats(to + 9 * 2048, l_, exchange_full);
    } else {
      if (thread_ == 0) sm90::barrier_arrive_expect(&shared_.exchange_full[at], sizeof shared_.other[at]);
      sm90::barrier_wait_cluster(&shared_.exchange_full[at], exchanges_ >> 1 & 1);
      const float4(&other)[10][128] = shared_.other[at];
      const float4 m4 = other[8][thread_], l4 = other[9][thread_];
      const float m[4] = {m4.x, m4.y, m4.z, m4.w}, l[4] = {l4.x, l4.y, l4.z, l4.w};
      float mine[4], its[4];
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float row_max = fmaxf(m_[i], m[i]);
        mine[i] = exp2_diff(m_[i], row_max), its[i] = exp2_diff(m[i], row_max);
        m_[i] = row_max, l_[i] = l_[i] * mine[i] + l[i] * its[i];
      }
#pragma unroll
      for (int b = 0; b < 4; b++)
#pragma unroll
        for (int i = 0; i < 2; i++) {
          const float4 x = other[2 * b + i][thread_];
          const float o[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const int c = which(4 * i + e);
            o_[b][4 * i + e] = o_[b][4 * i + e] * mine[c] + o[e] * its[c];
          }
        }
    }
    exchanges_++;
  }

  __device__ void store(const Segment& s, int rows) {
    const attention::Params& p = a_.p;
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (column(i) >= rows) continue;
      const int at = s.packed + column(i);
      const int64_t token = s.q_begin + at / a_.group, head = at % a_.group;
      const float inverse = l_[i] == 0 ? 0.f : 1.f / l_[i];
      uint16_t* out = static_cast<uint16_t*>(p.out) + token * p.out_token + head * p.out_head;
#pragma unroll
      for (int b = 0; b < 4; b++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int e = i / 2 * 4 + half * 2 + i % 2;
          out[dim(b, e)] = static_cast<uint16_t>(round_pair<T>(o_[b][e] * inverse, 0.f));
        }
      if (p.lse && kSide == 0 && warp_ == 0 && lane_ < 4)
        p.lse[token * p.lse_token + head * p.lse_head] = natural_log(m_[i], l_[i]);
    }
  }
  __device__ void store_partial(char* partial, int rows) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (column(i) >= rows) continue;
#pragma unroll
      for (int b = 0; b < 4; b++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int e = i / 2 * 4 + half * 2 + i % 2;
          partial_row(partial, column(i))[dim(b, e)] = o_[b][e];
        }
      if (kSide == 0 && warp_ == 0 && lane_ < 4) partial_sums<kRows>(partial, column(i)) = make_float2(m_[i], l_[i]);
    }
  }

  Shared& shared_;
  const RunStart& run_start_;
  int exchanges_ = 0;
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    mla_decode_swap_qk_h16_kernel(const __grid_constant__ WgmmaArgs a, const __grid_constant__ sm90::TensorMap map) {
  extern __shared__ __align__(1024) char raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    init_tile_barriers(a, shared);
    for (int at = 0; at < 2; at++) sm90::barrier_init(&shared.exchange_full[at], 1);
    sm90::barrier_init(&shared.block_barrier, kThreads);
    sm90::barrier_init_fence();
    if (a.box_tokens > 0) sm90::prefetch_tensor_map(&map);
  }
  __syncwarp();
  if (a.halves > 1)
    sm90::cluster_arrive_relaxed();  // with the barriers; the wait is where the other block's are needed
  sm90::pdl_wait();
  const RunStart run_start = find_start<kThreads>(a, kRows, shared.scratch);
  if (a.halves > 1) sm90::cluster_wait();
  sm90::pdl_trigger();
  const Walk walk(a, kRows, run_start);
  if (threadIdx.x >= kConsumers) {
    Producer(a, map, shared).run(walk);
  } else if (threadIdx.x < 128) {
    Consumer<T, 0>(a, shared, run_start).run(walk);
  } else {
    Consumer<T, 1>(a, shared, run_start).run(walk);
  }
  __syncwarp();
  if (a.halves > 1) sm90::cluster_sync_relaxed();  // the other block's shared memory is there until it was written
  if (run_start.whole) return;
  combine<T, kRows, kThreads, sizeof(Shared)>(a, run_start, raw, &shared.block_barrier);
}

template <class T>
void launch(const WgmmaArgs& a, rk_stream stream) {
  const sm90::TensorMap map = a.box_tokens > 0 ? cache_map(a) : sm90::TensorMap{};
  sm90::launch_dependent("mla_decode", a.p.device, stream, mla_decode_swap_qk_h16_kernel<T>,
                         {dim3(blocks_of(a)), kThreads, static_cast<int>(sizeof(Shared)), a.halves, true}, a, map);
}

}  // namespace radix::mla::swap_qk_h16
