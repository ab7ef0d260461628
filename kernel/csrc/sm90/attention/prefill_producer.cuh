// The producer of prefill: deals the tiles, and brings queries, keys and values to shared memory.
#pragma once

#include "sm90/attention/prefill_config.cuh"
#include "sm90/attention/prefill_gather.cuh"
#include "sm90/attention/prefill_transpose.cuh"
#include "sm90/common/cluster.cuh"
#include "sm90/common/pdl.cuh"
#include "sm90/common/tma.cuh"

namespace radix::attention::prefill {

// A warp of the producer warpgroup. The first deals the tiles and copies queries; all four copy keys and values: warps
// 0 and 1 keys, 2 and 3 values, each every other block of 128 bytes. Of FP8 a row is one block: warps 1 and 3 transpose
// the values instead.
template <class C>
class Producer {
 public:
  __device__ Producer(const Args& a, Shared<C>& shared, const TensorMap* q, const TensorMap* k, const TensorMap* v)
      : a_(a),
        shared_(shared),
        q_(q),
        keys_(threadIdx.x < 64),
        map_(keys_ ? k : v),
        lane_(threadIdx.x % 32),
        rank_(C::kCluster > 1 ? cluster_rank() : 0) {}

  __device__ void run() {
    if (C::kFp8 && threadIdx.x / 32 % 2) return transpose_values();
    Gatherer<C, Shared<C>> gatherer(a_, shared_);
    Schedule schedule(a_, sizeof(typename C::T), blockIdx.x / C::kCluster, gridDim.x / C::kCluster);
    for (int i = 0;; i++) {
      const Tile& t = shared_.tiles[i & 1];
      threadIdx.x < 32 ? deal(schedule, i) : barrier_wait(&shared_.q_full, i & 1);
      if (t.row < 0) break;
      if constexpr (C::kGather) {
        gatherer.gather(t);
      } else {
        send_blocks(t);
      }
      __syncwarp();
      if (threadIdx.x >= 32) barrier_arrive_warp(&shared_.q_empty);  // the tile was read
    }
    pdl_trigger();
  }

 private:
  // The warps that transpose FP8 values.
  __device__ void transpose_values() {
    if constexpr (C::kFp8) {
      Transposer<C> transposer(shared_, threadIdx.x / 64);
      for (int i = 0;; i++) {
        barrier_wait(&shared_.q_full, i & 1);
        const Tile& t = shared_.tiles[i & 1];
        if (t.row < 0) break;
        transposer.transpose(t);
        __syncwarp();
        barrier_arrive_warp(&shared_.q_empty);
      }
      pdl_trigger();
    }
  }

  // The first warp: the block's i-th tile.
  __device__ void deal(Schedule& schedule, int i) {
    Tile t = schedule.template next<C::kBlockN>();
    // The later tile of a pair, which sees more keys, goes to the two blocks alternately.
    if (C::kCluster > 1) t.first += (rank_ ^ (i & 1)) * a_.tokens_per_tile;
    barrier_wait(&shared_.q_empty, (i & 1) ^ 1);
    if (lane_ == 0) send_queries(t, i & 1);
    __syncwarp();
  }

  __device__ void send_queries(const Tile& t, int slot) {
    shared_.tiles[slot] = t;
    if (t.n_begin == t.n_end) {
      barrier_arrive(&shared_.q_full);
      return;
    }
    const int group = a_.p.group();
    barrier_arrive_expect(&shared_.q_full, C::kKeyColumns * 128 * group * a_.tokens_per_tile);
    for (int c = 0; c < C::kKeyColumns; c++) {
      const bool held = c * C::kRowElements < C::kHeld;
      char* to = shared_.q + c * C::kBlockM * 128 + (held ? 0 : slot % C::kRests * C::kRestBytes);
      tma_load_3d(to, q_, &shared_.q_full, c * C::kRowElements, t.kv_head * group, t.q_begin + t.first,
                  L2Keep::first_out);
    }
  }

  __device__ void send_blocks(const Tile& t) {
    if (threadIdx.x / 32 % 2 >= C::kIssuers) return;
    int page = look_up(t, t.n_end - 1);
    for (int n = t.n_end - 1; n >= t.n_begin; n--) {
      const int ahead = n > t.n_begin ? look_up(t, n - 1) : 0;
      send_block(t, n, page);
      page = ahead;
    }
  }

  // Where in a block this lane's box begins; box_tokens tokens, if there are any. The blocks of a cluster alternate.
  __device__ int place_in_block() const { return (lane_ * C::kCluster + rank_) * a_.box_tokens; }
  __device__ int token(int n) const { return n * C::kBlockN + place_in_block(); }
  __device__ bool copies(const Tile& t, int n) const { return place_in_block() < C::kBlockN && token(n) < t.kv_len; }
  __device__ int look_up(const Tile& t, int n) const {
    if (!a_.p.page_table || !copies(t, n)) return 0;
    return a_.p.page_table[t.row * a_.p.table_row + page_of(token(n))];
  }
  __device__ int page_of(int token) const {
    return a_.page_shift >= 0 ? token >> a_.page_shift : token / a_.p.page_size;
  }

  __device__ void send_block(const Tile& t, int n, int page) {
    uint64_t* full = &(keys_ ? shared_.k_full : shared_.v_full)[ring_.index];
    barrier_wait(&(keys_ ? shared_.k_empty : shared_.v_empty)[ring_.index], ring_.parity ^ 1);
    const bool mine = copies(t, n);
    const int half = threadIdx.x / 32 % 2, all = keys_ ? C::kKeyColumns : C::kValueColumns;
    const int columns = (all + C::kIssuers - 1 - half) / C::kIssuers;
    const int tokens = min(C::kBlockN, t.kv_len - n * C::kBlockN);
    const int boxes = (tokens + a_.box_tokens - 1) / a_.box_tokens;
    if (lane_ == 0) barrier_arrive_expect(full, boxes * a_.box_tokens * columns * 128);
    __syncwarp();
    if (mine) {
      const int at = a_.p.page_table ? token(n) - page_of(token(n)) * a_.p.page_size : t.kv_begin + token(n);
      char* to = (keys_ ? shared_.k[ring_.index] : shared_.v[ring_.index]) + place_in_block() * 128;
      for (int c = half; c < all; c += C::kIssuers)
        if constexpr (C::kCluster > 1) {
          tma_multicast_4d(to + c * C::kBlockN * 128, map_, full, (1 << C::kCluster) - 1, c * C::kRowElements, at,
                           t.kv_head, page, L2Keep::last_out);
        } else {
          tma_load_4d(to + c * C::kBlockN * 128, map_, full, c * C::kRowElements, at, t.kv_head, page,
                      L2Keep::last_out);
        }
    }
    __syncwarp();
    ring_.next();
  }

  const Args& a_;
  Shared<C>& shared_;
  const TensorMap* q_;
  bool keys_;
  const TensorMap* map_;
  int lane_, rank_;
  Ring<C::kStages> ring_;
};

}  // namespace radix::attention::prefill
