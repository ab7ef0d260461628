// One side of the kernels that swap the operands of the products for up to 16 query rows (decode_swap_qk_h16.cuh,
// decode_cluster_h16.cuh): a tile's 64 tokens are the rows of the products and the query rows their 16 columns, so that
// few query rows waste little of the tensor cores: S^T = K Q^T, O^T = V^T P^T.
//
//   consumer 0   dimensions 0 .. 255: its half of the sum S, then O^T of these dimensions
//   consumer 1   dimensions 256 .. 511 and the rotary ones, the same
//   producer     tiles into two buffers (producer.cuh)
//
// The halves of S are exchanged through shared memory, once a tile; both consumers compute the softmax. A warp has 16
// of a tile's tokens, so row maxima pass through shared memory, and P^T lies there as operand of the second product.
//
// Shared memory (struct Operands), 184 KiB:
//
//   | q                | 18 KiB     | 9 blocks of 64 dimensions: [16 query rows, 128 bytes]                         |
//   | tile[0], tile[1] | 2 x 72 KiB | 9 blocks of 64 dimensions: [64 tokens, 128 bytes]; the last is the rotary one |
//   | p                | 2 x 2 KiB  | P^T of each consumer: [16 query rows, 64 tokens]                              |
//   | partial_scores   | 2 x 8 KiB  | the halves of S to exchange, double-buffered                                  |
//   | row_max, row_sum | 1.5 KiB    | of the warps                                                                  |
//   | full, empty      |            | barriers of the tiles                                                         |
#pragma once

#include "sm90/common/convert.cuh"
#include "sm90/common/ldmatrix.cuh"
#include "sm90/common/shared_memory.cuh"
#include "sm90/mla/role.cuh"

namespace radix::mla::swap_qk_h16 {

using sm90::named_barrier;

constexpr int kThreads = 384, kConsumers = 256;
constexpr int kQueryBlockBytes = kRows * 128;

struct Operands {
  char q[kBlocks * kQueryBlockBytes];   // in blocks of 64 dimensions: [query row][128 bytes], swizzled
  char tile[2][kBlocks * kBlockBytes];  // of two tiles: [token][128 bytes], swizzled
  char p[2][kRows * 128];               // of a warpgroup: [query row][token], in the swizzle
  float4 partial_scores[2][2][2][128];  // halves of S, double-buffered
  float row_max[2][2][4][kRows];        // of a warp, double-buffered
  float row_sum[2][4][kRows];           // l of a warp
  uint64_t full[2][kSlices], empty[2][kSlices];
};
static_assert(offsetof(Operands, tile) % sm90::kSwizzleAtom == 0 && offsetof(Operands, p) % sm90::kSwizzleAtom == 0,
              "swizzled operands");
static_assert(kRows == 16, "query rows are N of the swapped products; a thread has four of their columns");
static_assert(kThreads == 3 * sm90::kWarpgroup && kConsumers == 2 * sm90::kWarpgroup, "two sides and a producer");

enum Barrier { kBoth = 1, kOwn };

// By one thread, before the block meets.
__device__ inline void init_tile_barriers(const WgmmaArgs& a, Operands& shared) {
  for (int at = 0; at < 2; at++)
    for (int slice = 0; slice < kSlices; slice++) {
      sm90::barrier_init(&shared.full[at][slice], a.box_tokens > 0 ? 1 : 128);
      sm90::barrier_init(&shared.empty[at][slice], sm90::kWarpArrivals * 4);
    }
}

// 16 bytes to `to` in another block's shared memory, which count at `barrier` there.
__device__ inline void send_floats(uint32_t to, const float* v, uint32_t barrier) {
  sm90::store_async(to, {__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3])},
                    barrier);
}

// A consumer warpgroup: dimensions 256 kSide .. + 256. A thread's accumulators lie at tokens or dimensions 16 w + g (+
// 8) and query rows column(i), g = lane / 4.
template <class T, int kSide>
class Side {
 public:
  __device__ Side(const WgmmaArgs& a, Operands& operands)
      : a_(a),
        operands_(operands),
        thread_(threadIdx.x % 128),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x % 128 / 32),
        scale_(a.p.scale * 1.4426950408889634f) {}

 protected:
  // O^T, m and l of the segment's tiles, for its query rows from `packed` on, `rows` of them in use.
  __device__ void attend(const Segment& s, int rows) {
    load_queries<T, kRows, kConsumers / 32>(a_, s, s.packed, rows, threadIdx.x / 32, lane_, operands_.q);
    named_barrier(kBoth, kConsumers);
    reset(s);
    for (int t = 0; t < s.tiles; t++) tile(t & 1, (s.first + t) * kTile, s.kv_len);
    reduce_row_sum();
  }
  // Nothing seen so far.
  __device__ void reset(const Segment& s) {
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
  }

  // Query row of accumulators i, of the four columns that a thread has: elements e of 8 columns c are 4 c + e.
  __device__ int column(int i) const { return i / 2 * 8 + lane_ % 4 * 2 + i % 2; }
  // Which of them element e of eight accumulators belongs to.
  __device__ static constexpr int which(int e) { return e / 4 * 2 + e % 2; }
  // Dimension of element e of o_[b].
  __device__ int dim(int b, int e) const { return kSide * 256 + b * 64 + warp_ * 16 + lane_ / 4 + e % 4 / 2 * 8; }

  const WgmmaArgs& a_;
  Operands& operands_;
  int thread_, lane_, warp_;
  float m_[4], l_[4];
  float o_[4][8];

 private:
  __device__ void tile(int at, int token, int kv_len) {
    float s[8];
    scores(s, at);
    // Barriers of the softmax stand before the product that reads the zeros.
    if (a_.box_tokens > 0 && token + kTile > kv_len)
      clear_tokens(operands_.tile[at], kSide, max(0, kv_len - token), thread_);
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
    const uint64_t q = sm90::swizzled_operand(operands_.q), k = sm90::swizzled_operand(operands_.tile[at]);
#pragma unroll
    for (int slice = kSide; slice < kSlices; slice += 2) {
      sm90::barrier_wait(&operands_.full[at][slice], use_ >> at & 1);
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
    float4(&halves)[2][2][128] = operands_.partial_scores[buffer_];
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
    float(&shared)[4][kRows] = operands_.row_max[kSide][buffer_];
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
    const uint32_t to = sm90::shared_address(operands_.p[kSide]) + row * 128 + ((piece ^ row % 8) << 4);
    sm90::stmatrix_x4_trans(to, round_pair<T>(s[0], s[1]), round_pair<T>(s[2], s[3]), round_pair<T>(s[4], s[5]),
                            round_pair<T>(s[6], s[7]));
    sm90::fence_async_shared();
    named_barrier(kOwn + kSide, 128);
  }

  // O^T += V^T P^T. This warp has read a slice of the buffer, as the scores' products have.
  __device__ void add_values(int at) {
    const uint64_t v = sm90::transposed_operand(operands_.tile[at] + kSide * kLeftBlocks * kBlockBytes, kBlockBytes);
    const uint64_t p = sm90::swizzled_operand(operands_.p[kSide]);
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
    sm90::barrier_arrive_warp(&operands_.empty[at][kSide]);
    sm90::wgmma_wait<0>();
#pragma unroll
    for (int b = 0; b < 4; b++) sm90::wgmma_hold(o_[b]);
    sm90::barrier_arrive_warp(&operands_.empty[at][kSide + 2]);
  }

  // l becomes the sum over all lanes and warps.
  __device__ void reduce_row_sum() {
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int mask = 4; mask < 32; mask *= 2) l_[i] += __shfl_xor_sync(~0u, l_[i], mask);
    float(&shared)[4][kRows] = operands_.row_sum[kSide];
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

  float scale_;
  uint32_t use_ = 0;  // bit `at`: parity of a buffer's present use
  int buffer_ = 0;
  int limit_[4], all_ = 0;
};

}  // namespace radix::mla::swap_qk_h16
