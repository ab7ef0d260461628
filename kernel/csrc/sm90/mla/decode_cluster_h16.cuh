// MLA decode for few rows of up to 16 query rows each: bound by latency, so nothing is waited for that need not be.
//
// A cluster of eight blocks has a query block of a row, or of a long row a part (share.cuh), and each of its
// blocks has tiles of it. They join through shared memory: every block gets of all of them what they have of its own
// dimensions, 64 of them with eight blocks, and no block meets another but to read it. Clusters without work end at
// once. Where several have parts of a row, each block leaves its dimensions in the workspace, and of the blocks that
// have the same ones the last to arrive joins them (last_arrival.cuh), in the order of the parts.
//
// Products and softmax are those of decode_swap_qk_h16 (swap_qk_h16_side.cuh).
//
// Shared memory (struct Shared), 217 KiB:
//
//   | Operands     | 184 KiB | queries, tiles, probabilities and their barriers (swap_qk_h16_side.cuh)   |
//   | part_o       | 32 KiB  | what each block of the cluster has of this one's dimensions of O          |
//   | part_sums    | 1 KiB   | m and l of them                                                           |
//   | joined, last |         | the barrier at which the parts' bytes count; whether the block goes on    |
#pragma once

#include "sm90/common/last_arrival.cuh"
#include "sm90/mla/share.cuh"
#include "sm90/mla/swap_qk_h16_side.cuh"

namespace radix::mla::cluster_h16 {

using swap_qk_h16::kBoth;
using swap_qk_h16::kConsumers;
using swap_qk_h16::kThreads;
using swap_qk_h16::Operands;
using swap_qk_h16::Side;

static_assert(kRows == swap_qk_h16::kRows);
constexpr int kDimBlocks = kLatent / 64;  // 64 dimensions: an accumulator of a side
constexpr int kPairs = kRows / 2;

// Of query rows r and r + 1 dimensions d and d + 8: o.x and o.z of the first row, o.y and o.w of the second, relative
// to 2^m; (m, l) of the first row in sums.x, y, of the second in z, w.
struct Quad {
  float4 o, sums;
};
__device__ inline Quad nothing() {
  return {{0, 0, 0, 0}, {-INFINITY, 0, -INFINITY, 0}};
}

// `count` partial results in order, load(n) the n-th; kAhead of them are asked for at once.
template <int kAhead, class Load>
__device__ inline Quad join(int count, const Load& load) {
  Quad sum = nothing();
  for (int first = 0; first < count; first += kAhead) {
    Quad ahead[kAhead];
    float m0 = sum.sums.x, m1 = sum.sums.z;
#pragma unroll
    for (int n = 0; n < kAhead; n++) {
      ahead[n] = nothing();
      if (first + n < count) ahead[n] = load(first + n);
    }
#pragma unroll
    for (int n = 0; n < kAhead; n++) m0 = fmaxf(m0, ahead[n].sums.x), m1 = fmaxf(m1, ahead[n].sums.z);
    Quad next = {{0, 0, 0, 0}, {m0, 0, m1, 0}};
    const auto add = [&next, m0, m1](const Quad& x) {
      const float w0 = exp2_diff(x.sums.x, m0), w1 = exp2_diff(x.sums.z, m1);
      next.o.x += x.o.x * w0, next.o.y += x.o.y * w1, next.o.z += x.o.z * w0, next.o.w += x.o.w * w1;
      next.sums.y += x.sums.y * w0, next.sums.w += x.sums.w * w1;
    };
    add(sum);
#pragma unroll
    for (int n = 0; n < kAhead; n++) add(ahead[n]);
    sum = next;
  }
  return sum;
}

// What follows from the blocks of a cluster: kOwn accumulators of 64 dimensions belong to each.
template <int kCluster>
struct Config {
  static constexpr int kOwn = kDimBlocks / kCluster;
  static constexpr int kRowsOfLane = 1;  // rows of the batch that a lane looks after
  // What a block leaves in the workspace.
  struct Partial {
    float4 o[kOwn][kConsumers];
    float4 sums[kPairs];
  };
  struct Shared : Operands {
    float4 part_o[kCluster][kOwn][2][128];  // as accumulators lie: elements 4 i .. of thread t of a warpgroup at [i][t]
    float4 part_sums[kCluster][kPairs];
    uint64_t joined;
    bool last;
  };
  static constexpr uint32_t kSourceBytes = sizeof(Shared::part_o[0]) + sizeof(Shared::part_sums[0]);
  static constexpr int64_t kWordBytes = sizeof(unsigned long long) * kMostBlocks;
  static_assert(kDimBlocks % kCluster == 0 && kCluster <= sm90::kPortableCluster);
  static_assert(blocks_of_row(32 * kRowsOfLane + 1, kRows) < kCluster,
                "the lanes of a warp have all rows of the batch");
  static_assert(kWordBytes + sizeof(Partial) * kMostBlocks == workspace_bytes(kCluster),
                "words of arrival, and behind them the partial results");
  static_assert(sizeof(Shared) <= sm90::kMaxSharedBytes);
};

// A cluster's query blocks: one, unless the hint about the queries was too low.
class QueryBlocks {
 public:
  __device__ QueryBlocks(const WgmmaArgs& a, const Share& share)
      : segment(share.segment), step_(query_blocks_of(a.p, kRows) * kRows), end_(share.segment.queries * a.group) {}

  __device__ bool more() const { return segment.packed < end_; }
  __device__ int rows() const { return min(kRows, end_ - segment.packed); }

  // This warp has read what other blocks sent of the query block. It waits for all others (cluster_wait) before its
  // block ends, and before it sends of the next query block, where there is one: then the arrival orders memory too,
  // which takes longer.
  __device__ void leave() {
    __syncwarp();
    segment.packed += step_;
    more() ? sm90::cluster_arrive() : sm90::cluster_arrive_relaxed();
  }

  Segment segment;

 private:
  int step_, end_;
};

// The consumers' work once their sums are complete, side by side: thread 128 i + t has elements 4 i .. 4 i + 3 of what
// thread t of a warpgroup had of the block's dimensions.
template <class T, int kCluster>
class Joiner {
  using C = Config<kCluster>;

 public:
  using State = Quad[C::kOwn];

  __device__ Joiner(const WgmmaArgs& a, typename C::Shared& shared, const Share& share, int rank)
      : a_(a), shared_(shared), share_(share), rank_(rank), half_(threadIdx.x / 128), thread_(threadIdx.x % 128) {}

  // The blocks' parts, all complete once their bytes are here. parity: of the barrier's phase.
  __device__ void join_blocks(State& mine, uint32_t parity) const {
    if (threadIdx.x == 0) sm90::barrier_arrive_expect(&shared_.joined, share_.sources * C::kSourceBytes);
    sm90::barrier_wait_cluster(&shared_.joined, parity);
#pragma unroll
    for (int b = 0; b < C::kOwn; b++)
      mine[b] = join<kCluster>(share_.sources, [this, b](int n) {
        return Quad{shared_.part_o[n][b][half_][thread_], shared_.part_sums[n][pair()]};
      });
  }

  // Leaves `mine` in the workspace; true in the row's last block that did: `mine` is then the sum of all parts.
  __device__ bool join_parts(State& mine) const {
    Partial& partial = partial_of(share_.part);
#pragma unroll
    for (int b = 0; b < C::kOwn; b++) partial.o[b][threadIdx.x] = mine[b].o;
    if (thread_ < 4) partial.sums[pair()] = mine[0].sums;
    sm90::named_barrier(kBoth, kConsumers);
    if (threadIdx.x < 32) {
      auto* words = reinterpret_cast<unsigned long long*>(a_.nodes) + share_.first_cluster * kCluster + rank_;
      const bool last = sm90::last_to_arrive(words, share_.parts, kCluster, share_.part);
      if (threadIdx.x == 0) shared_.last = last;
    }
    sm90::named_barrier(kBoth, kConsumers);
    if (!shared_.last) return false;
#pragma unroll
    for (int b = 0; b < C::kOwn; b++)
      mine[b] = join<8>(share_.parts, [this, b](int n) {
        const Partial& from = partial_of(n);
        return Quad{__ldcg(&from.o[b][threadIdx.x]), __ldcg(&from.sums[pair()])};
      });
    return true;
  }

  // To the query rows from `packed` on, `rows` of them.
  __device__ void store(const State& x, int packed, int rows) const {
    store_row(x, false, packed, 2 * pair(), rows);
    store_row(x, true, packed, 2 * pair() + 1, rows);
  }

 private:
  using Partial = typename C::Partial;

  // Which two query rows this thread has.
  __device__ int pair() const { return half_ * 4 + thread_ % 4; }
  __device__ Partial& partial_of(int part) const {
    return reinterpret_cast<Partial*>(a_.nodes + C::kWordBytes)[(share_.first_cluster + part) * kCluster + rank_];
  }
  __device__ void store_row(const State& x, bool second, int packed, int row, int rows) const {
    if (row >= rows) return;
    const attention::Params& p = a_.p;
    const int64_t token = share_.segment.q_begin + (packed + row) / a_.group, head = (packed + row) % a_.group;
    const float m = second ? x[0].sums.z : x[0].sums.x, l = second ? x[0].sums.w : x[0].sums.y;
    const float inverse = l == 0 ? 0.f : 1.f / l;
    const int dim = rank_ * C::kOwn * 64 + thread_ / 32 * 16 + thread_ % 32 / 4;
    uint16_t* out = static_cast<uint16_t*>(p.out) + token * p.out_token + head * p.out_head + dim;
#pragma unroll
    for (int b = 0; b < C::kOwn; b++) {
      const float low = second ? x[b].o.y : x[b].o.x, high = second ? x[b].o.w : x[b].o.z;
      out[b * 64] = static_cast<uint16_t>(round_pair<T>(low * inverse, 0.f));
      out[b * 64 + 8] = static_cast<uint16_t>(round_pair<T>(high * inverse, 0.f));
    }
    if (p.lse && rank_ == 0 && thread_ < 4) p.lse[token * p.lse_token + head * p.lse_head] = natural_log(m, l);
  }

  const WgmmaArgs& a_;
  typename C::Shared& shared_;
  const Share& share_;
  int rank_, half_, thread_;
};

// A consumer warpgroup.
template <class T, int kSide, int kCluster>
class Consumer : Side<T, kSide> {
  using Base = Side<T, kSide>;
  using Base::a_;
  using Base::attend;
  using Base::l_;
  using Base::lane_;
  using Base::m_;
  using Base::o_;
  using Base::thread_;
  using Base::warp_;
  using C = Config<kCluster>;

 public:
  __device__ Consumer(const WgmmaArgs& a, typename C::Shared& shared, const Share& share, int rank)
      : Base(a, shared), shared_(shared), share_(share), rank_(rank) {}

  __device__ void run() {
    const Joiner<T, kCluster> joiner(a_, shared_, share_, rank_);
    uint32_t parity = 0;
    for (QueryBlocks blocks(a_, share_); blocks.more(); parity ^= 1) {
      const int packed = blocks.segment.packed, rows = blocks.rows();
      if (blocks.segment.tiles > 0) {
        attend(blocks.segment, rows);
        send_parts();
      }
      Quad sum[C::kOwn];
      joiner.join_blocks(sum, parity);
      blocks.leave();
      if (share_.parts == 1 || joiner.join_parts(sum)) joiner.store(sum, packed, rows);
      __syncwarp();
      sm90::cluster_wait();
    }
  }

 private:
  // To each block its dimensions of O, and m and l of all query rows by one warp.
  __device__ void send_parts() const {
#pragma unroll
    for (int b = 0; b < 4; b++) {
      const int at = kSide * 4 + b, block = at / C::kOwn;
      const uint32_t to = sm90::remote_address(&shared_.part_o[rank_][at % C::kOwn][0][thread_], block);
      const uint32_t joined = sm90::remote_address(&shared_.joined, block);
#pragma unroll
      for (int i = 0; i < 2; i++)
        swap_qk_h16::send_floats(to + i * sizeof(shared_.part_o[0][0][0]), o_[b] + 4 * i, joined);
    }
    const int block = kSide * 4 + warp_;
    if (lane_ >= 4 || block >= kCluster) return;
    const uint32_t joined = sm90::remote_address(&shared_.joined, block);
#pragma unroll
    for (int i = 0; i < 2; i++) {
      const float sums[4] = {m_[2 * i], l_[2 * i], m_[2 * i + 1], l_[2 * i + 1]};
      swap_qk_h16::send_floats(sm90::remote_address(&shared_.part_sums[rank_][i * 4 + lane_], block), sums, joined);
    }
  }

  typename C::Shared& shared_;
  const Share& share_;
  int rank_;
};

template <class T, int kCluster>
__global__ void __launch_bounds__(kThreads, 1)
    mla_decode_cluster_h16_kernel(const __grid_constant__ WgmmaArgs a, const __grid_constant__ sm90::TensorMap map) {
  using C = Config<kCluster>;
  extern __shared__ __align__(1024) char raw[];
  auto& shared = *reinterpret_cast<typename C::Shared*>(raw);
  if (threadIdx.x == 0) {
    swap_qk_h16::init_tile_barriers(a, shared);
    sm90::barrier_init(&shared.joined, 1);
    sm90::barrier_init_fence();
    if (a.box_tokens > 0) sm90::prefetch_tensor_map(&map);
  }
  __syncwarp();
  sm90::cluster_arrive_relaxed();  // with the barriers
  sm90::pdl_wait();
  const int rank = sm90::cluster_rank();
  const Share share = find_share<kCluster, C::kRowsOfLane>(a, kRows, rank);
  sm90::cluster_wait();
  sm90::pdl_trigger();
  if (share.parts == 0) return;
  if (threadIdx.x < 128) return Consumer<T, 0, kCluster>(a, shared, share, rank).run();
  if (threadIdx.x < kConsumers) return Consumer<T, 1, kCluster>(a, shared, share, rank).run();
  Producer producer(a, map, shared);
  for (QueryBlocks blocks(a, share); blocks.more();) {
    if (blocks.segment.tiles > 0) producer.fetch(blocks.segment);
    blocks.leave();
    sm90::cluster_wait();
  }
}

template <class T, int kCluster>
void launch(const WgmmaArgs& a, rk_stream stream) {
  using C = Config<kCluster>;
  const auto kernel = mla_decode_cluster_h16_kernel<T, kCluster>;
  const sm90::TensorMap map = a.box_tokens > 0 ? cache_map(a) : sm90::TensorMap{};
  sm90::LaunchShape shape = {dim3(kCluster), kThreads, static_cast<int>(sizeof(typename C::Shared)), kCluster};
  // More than run at once would make a row wait for another's clusters; nobody waits for a cluster that does not run.
  const int at_once = std::min(kMostBlocks / kCluster, gpu::active_clusters("mla_decode", a.p.device, kernel, shape));
  const int needed = static_cast<int>(a.p.batch) * query_blocks_of(a.p, kRows);
  shape.grid = dim3(std::max(needed, at_once) * kCluster);
  sm90::launch_dependent("mla_decode", a.p.device, stream, kernel, shape, a, map);
}

}  // namespace radix::mla::cluster_h16
