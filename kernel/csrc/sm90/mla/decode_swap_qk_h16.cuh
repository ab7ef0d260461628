// MLA decode for up to 16 query rows: bound by the bytes of the cache.
//
// The operands are swapped: a tile's 64 tokens are the rows of the products and the query rows their 16 columns, so
// that few query rows waste little of the tensor cores: S^T = K Q^T, O^T = V^T P^T.
//
//   consumer 0   dimensions 0 .. 255: its half of the sum S, then O^T of these dimensions
//   consumer 1   dimensions 256 .. 511 and the rotary ones, the same
//   producer     tiles into two buffers (producer.cuh)
//
// The halves of S are exchanged through shared memory, once a tile; both consumers compute the softmax. A warp has 16
// of a tile's tokens, so row maxima pass through shared memory, and P^T lies there as operand of the second product.
//
// Shared memory (struct Shared), 224 KiB:
//
//   | q                | 18 KiB     | 9 blocks of 64 dimensions: [16 query rows, 128 bytes]                         |
//   | tile[0], tile[1] | 2 x 72 KiB | 9 blocks of 64 dimensions: [64 tokens, 128 bytes]; the last is the rotary one |
//   | p                | 2 x 2 KiB  | P^T of each consumer: [16 query rows, 64 tokens]                              |
//   | partial_scores   | 2 x 8 KiB  | the halves of S to exchange, double-buffered                                  |
//   | row_max, row_sum | 1.5 KiB    | of the warps                                                                  |
//   | other            | 2 x 20 KiB | O, m and l of the other half of a run, double-buffered                        |
//   | full, empty, ... |            | barriers                                                                      |
#pragma once

#include "sm90/common/convert.cuh"
#include "sm90/common/ldmatrix.cuh"
#include "sm90/common/shared_memory.cuh"
#include "sm90/mla/role.cuh"

namespace radix::mla::swap_qk_h16 {

using sm90::named_barrier;

constexpr int kThreads = 384, kConsumers = 256;
constexpr int kQueryBlockBytes = kRows * 128;

struct Shared {
  char q[kBlocks * kQueryBlockBytes];   // in blocks of 64 dimensions: [query row][128 bytes], swizzled
  char tile[2][kBlocks * kBlockBytes];  // of two tiles: [token][128 bytes], swizzled
  char p[2][kRows * 128];               // of a warpgroup: [query row][token], in the swizzle
  float4 partial_scores[2][2][2][128];  // halves of S, double-buffered
  float row_max[2][2][4][kRows];        // of a warp, double-buffered
  float row_sum[2][4][kRows];           // l of a warp
  float4 other[2][10][128];             // of a run's other half: O, m, l; double-buffered
  uint64_t full[2][kSlices], empty[2][kSlices], exchange_full[2], block_barrier;
  int scratch[kThreads / 32 + 2];
};
static_assert(sizeof(Shared) <= sm90::kMaxSharedBytes);
static_assert(offsetof(Shared, tile) % sm90::kSwizzleAtom == 0 && offsetof(Shared, p) % sm90::kSwizzleAtom == 0,
              "swizzled operands");
static_assert(kRows == 16, "query rows are N of the swapped products; a thread has four of their columns");
static_assert(kThreads == 3 * sm90::kWarpgroup && kConsumers == 2 * sm90::kWarpgroup, "two sides and a producer");

enum Barrier { kBoth = 1, kOwn };

// A consumer warpgroup: dimensions 256 kSide .. + 256. A thread's accumulators lie at tokens or dimensions 16 w + g (+
// 8) and query rows column(i), g = lane / 4.
template <class T, int kSide>
class Consumer {
 public:
  __device__ Consumer(const WgmmaArgs& a, Shared& shared, const RunStart& run_start)
      : a_(a),
        shared_(shared),
        thread_(threadIdx.x % 128),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x % 128 / 32),
        run_start_(run_start),
        scale_(a.p.scale * 1.4426950408889634f) {}

  __device__ void run(Walk walk) {
    Segment s;
    PendingBlock pending{};
    while (walk.next(s)) {
      const int rows = min(kRows, s.queries * a_.group - s.packed);
      load_queries<T, kRows, kConsumers / 32>(a_, s, s.packed, rows, threadIdx.x / 32, lane_, shared_.q);
      named_barrier(kBoth, kConsumers);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int position = s.kv_len - s.queries + (s.packed + column(i)) / a_.group;
        limit_[i] = a_.p.causal ? min(s.kv_len, position + 1) : s.kv_len;
        m_[i] = -INFINITY, l_[i] = 0;
      }
      // Tokens that the block's first query sees, and so all of them.
      all_ = a_.p.causal ? min(s.kv_len, s.kv_len - s.queries + s.packed / a_.group + 1) : s.kv_len;
#pragma unroll
      for (int b = 0; b < 4; b++)
#pragma unroll
        for (int i = 0; i < 8; i++) o_[b][i] = 0;
      for (int t = 0; t < s.tiles; t++) tile(t & 1, (s.first + t) * kTile, s.kv_len);
      reduce_row_sum();
      if (s.halved) join_halves();
      if (!s.halved || kSide == run_start_.half) {
        s.complete() ? store(s, rows) : store_partial(partial_of<kRows>(a_, run_start_.run, s.begun), rows);
      }
      if (s.begun && !s.ended) pending = begin(a_, s, run_start_, kRows);
    }
    if (threadIdx.x == 0 && run_start_.half == 0) pending_of(a_, run_start_.run) = pending;
  }

 private:
  // Query row of accumulators i, of the four columns that a thread has: elements e of 8 columns c are 4 c + e.
  __device__ int column(int i) const { return i / 2 * 8 + lane_ % 4 * 2 + i % 2; }
  // Which of them element e of eight accumulators belongs to.
  __device__ static constexpr int which(int e) { return e / 4 * 2 + e % 2; }

  __device__ void tile(int at, int token, int kv_len) {
    float s[8];
    scores(s, at);
    // Barriers of the softmax stand before the product that reads the zeros.
    if (a_.box_tokens > 0 && token + kTile > kv_len)
      clear_tokens(shared_.tile[at], kSide, max(0, kv_len - token), thread_);
    mask_and_scale(s, token);
    online_softmax(s);
    store_probabilities(s);
    add_values(at);
    use_ ^= 1 << at;
    buffer_ ^= 1;
  }

  // S^T of a tile.
  __device__ void scores(float (&s)[8], int at) {
    float partial[2][8];  // two chains: a product would wait for the one before it
    const uint64_t q = sm90::swizzled_operand(shared_.q), k = sm90::swizzled_operand(shared_.tile[at]);
#pragma unroll
    for (int slice = kSide; slice < kSlices; slice += 2) {
      sm90::barrier_wait(&shared_.full[at][slice], use_ >> at & 1);
      if (a_.box_tokens == 0) sm90::fence_async_shared();
      sm90::wgmma_fence();
#pragma unroll
      for (int block = slice_first(slice); block < slice_last(slice); block++)
#pragma unroll
        for (int step = 0; step < 4; step++)
          sm90::Wgmma<kOperand<T>, kRows>::run(partial[step % 2], sm90::next_k(k + block * (kBlockBytes >> 4), step),
                                               sm90::next_k(q + block * (kQueryBlockBytes >> 4), step),
                                               step > 1 || block > slice_first(kSide));
    }
    sm90::wgmma_commit();
    sm90::wgmma_wait<0>();
    sm90::wgmma_hold(partial[0]);
    sm90::wgmma_hold(partial[1]);
    float4(&halves)[2][2][128] = shared_.partial_scores[buffer_];
#pragma unroll
    for (int e = 0; e < 8; e++) s[e] = partial[0][e] + partial[1][e];
    halves[kSide][0][thread_] = make_float4(s[0], s[1], s[2], s[3]);
    halves[kSide][1][thread_] = make_float4(s[4], s[5], s[6], s[7]);
    named_barrier(kBoth, kConsumers);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float4 other = halves[1 - kSide][i][thread_];
      s[4 * i] += other.x, s[4 * i + 1] += other.y, s[4 * i + 2] += other.z, s[4 * i + 3] += other.w;
    }
  }

  // Scores in units of log2, what a query does not see -inf.
  __device__ void mask_and_scale(float (&s)[8], int token) {
#pragma unroll
    for (int e = 0; e < 8; e++) s[e] *= scale_;
    if (token + kTile <= all_) return;
    const int at = token + warp_ * 16 + lane_ / 4;
#pragma unroll
    for (int e = 0; e < 8; e++)
      if (at + e % 4 / 2 * 8 >= limit_[which(e)]) s[e] = -INFINITY;
  }

  // s becomes exp2(s - m), with m the maximum over all tokens so far; O^T and l follow.
  __device__ void online_softmax(float (&s)[8]) {
    float row_max[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      row_max[i] = fmaxf(s[i / 2 * 4 + i % 2], s[i / 2 * 4 + i % 2 + 2]);
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) row_max[i] = fmaxf(row_max[i], __shfl_xor_sync(~0u, row_max[i], mask));
    }
    float(&shared)[4][kRows] = shared_.row_max[kSide][buffer_];
    if (lane_ < 4) {
#pragma unroll
      for (int i = 0; i < 4; i++) shared[warp_][column(i)] = row_max[i];
    }
    named_barrier(kOwn + kSide, 128);
    bool raised = false;
    float rescale[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      row_max[i] = m_[i];
#pragma unroll
      for (int w = 0; w < 4; w++) row_max[i] = fmaxf(row_max[i], shared[w][column(i)]);
      rescale[i] = exp2_diff(m_[i], row_max[i]);
      raised |= rescale[i] != 1.f;
      m_[i] = row_max[i];
    }
    if (__any_sync(~0u, raised)) {
#pragma unroll
      for (int i = 0; i < 4; i++) l_[i] *= rescale[i];
#pragma unroll
      for (int b = 0; b < 4; b++)
#pragma unroll
        for (int e = 0; e < 8; e++) o_[b][e] *= rescale[which(e)];
    }
#pragma unroll
    for (int e = 0; e < 8; e++) {
      s[e] = exp2_diff(s[e], m_[which(e)]);
      l_[which(e)] += s[e];
    }
  }

  // P^T to shared memory: matrices of 8 tokens by 8 query rows, transposed on the way.
  __device__ void store_probabilities(const float (&s)[8]) {
    // Matrix i of the four: tokens 8 (i % 2), query rows 8 (i / 2); lane 8 i + r gives the address of its row r.
    const int row = lane_ / 16 * 8 + lane_ % 8, piece = warp_ * 2 + lane_ / 8 % 2;
    const uint32_t to = sm90::shared_address(shared_.p[kSide]) + row * 128 + ((piece ^ row % 8) << 4);
    sm90::stmatrix_x4_trans(to, round_pair<T>(s[0], s[1]), round_pair<T>(s[2], s[3]), round_pair<T>(s[4], s[5]),
                            round_pair<T>(s[6], s[7]));
    sm90::fence_async_shared();
    named_barrier(kOwn + kSide, 128);
  }

  // O^T += V^T P^T. This warp has read a slice of the buffer, as the scores' products have.
  __device__ void add_values(int at) {
    const uint64_t v = sm90::transposed_operand(shared_.tile[at] + kSide * kLeftBlocks * kBlockBytes, kBlockBytes);
    const uint64_t p = sm90::swizzled_operand(shared_.p[kSide]);
    sm90::wgmma_fence();
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
      for (int step = 0; step < 4; step++)
#pragma unroll
        for (int b = 2 * half; b < 2 * half + 2; b++)
          sm90::WgmmaTransposed<kOperand<T>, kRows, sm90::Transposed::a>::run(
              o_[b], sm90::advanced(v, b * kBlockBytes + step * 2048), sm90::next_k(p, step));
      sm90::wgmma_commit();
    }
    sm90::wgmma_wait<1>();
    sm90::barrier_arrive_warp(&shared_.empty[at][kSide]);
    sm90::wgmma_wait<0>();
#pragma unroll
    for (int b = 0; b < 4; b++) sm90::wgmma_hold(o_[b]);
    sm90::barrier_arrive_warp(&shared_.empty[at][kSide + 2]);
  }

  // l becomes the sum over all lanes and warps.
  __device__ void reduce_row_sum() {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) l_[i] += __shfl_xor_sync(~0u, l_[i], mask);
    float(&shared)[4][kRows] = shared_.row_sum[kSide];
    if (lane_ < 4) {
#pragma unroll
      for (int i = 0; i < 4; i++) shared[warp_][column(i)] = l_[i];
    }
    named_barrier(kOwn + kSide, 128);
#pragma unroll
    for (int i = 0; i < 4; i++) {
      l_[i] = 0;
#pragma unroll
      for (int w = 0; w < 4; w++) l_[i] += shared[w][column(i)];
    }
  }

  // The two halves of a run join: the left dimensions in the first block, the right ones in the second.
  __device__ void join_halves() {
    const int at = exchanges_ & 1;
    if (kSide != run_start_.half) {
      const uint32_t to = sm90::remote_address(&shared_.other[at][0][thread_], kSide);
      const uint32_t exchange_full = sm90::remote_address(&shared_.exchange_full[at], kSide);
#pragma unroll
      for (int b = 0; b < 4; b++)
#pragma unroll
        for (int i = 0; i < 2; i++) send(to + (2 * b + i) * 2048, o_[b] + 4 * i, exchange_full);
      send(to + 8 * 2048, m_, exchange_full);
      send(to + 9 * 2048, l_, exchange_full);
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

  __device__ static void send(uint32_t to, const float* v, uint32_t exchange_full) {
    sm90::store_async(to, {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])},
                      exchange_full);
  }

  // Dimension of element e of o_[b].
  __device__ int dim(int b, int e) const { return kSide * 256 + b * 64 + warp_ * 16 + lane_ / 4 + e % 4 / 2 * 8; }

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

  const WgmmaArgs& a_;
  Shared& shared_;
  int thread_, lane_, warp_;
  const RunStart& run_start_;
  float scale_;
  uint32_t use_ = 0;  // bit `at`: parity of a buffer's present use
  int buffer_ = 0, exchanges_ = 0;
  int limit_[4], all_ = 0;
  float m_[4], l_[4];
  float o_[4][8];
};

template <class T>
__global__ void __launch_bounds__(kThreads, 1)
    mla_decode_swap_qk_h16_kernel(const __grid_constant__ WgmmaArgs a, const __grid_constant__ sm90::TensorMap map) {
  extern __shared__ __align__(1024) char raw[];
  Shared& shared = *reinterpret_cast<Shared*>(raw);
  if (threadIdx.x == 0) {
    for (int at = 0; at < 2; at++)
      for (int slice = 0; slice < kSlices; slice++) {
        sm90::barrier_init(&shared.full[at][slice], a.box_tokens > 0 ? 1 : 128);
        sm90::barrier_init(&shared.empty[at][slice], sm90::kWarpArrivals * 4);
      }
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
