// The producer of prefill for pages too small for the copy engine (fewer than 8 tokens to a box): the whole producer
// warpgroup gathers keys and values row by row with cp.async, to where a tensor map would have put them.
#pragma once

#include "cuda/attention/prefill_schedule.h"
#include "cuda/hopper/mbarrier.h"

namespace radix::attention::prefill {

// 16 bytes to shared memory, or zeros.
__device__ inline void copy_async(uint32_t shared, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
__device__ inline void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kLeft>
__device__ inline void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// A block is signalled when the next one is on its way: its bytes have then had a block's time to arrive.
template <class C, class Shared>
class Gatherer {
  using T = typename C::T;
  static constexpr int kRows = C::kBlockN / C::kGatherers;  // of a warp
  static constexpr int kPlaces = (kRows + 31) / 32;
  static constexpr int kPiece = 16 / sizeof(T);  // elements of a copy

 public:
  __device__ Gatherer(const Args& a, Shared& shared)
      : a_(a), shared_(shared), warp_(threadIdx.x / 32 * C::kGatherers / 4), lane_(threadIdx.x % 32) {}

  __device__ void gather(const Tile& t) {
    if (t.n_begin == t.n_end) return;
    keys(t, t.n_end - 1);
    for (int n = t.n_end - 1; n >= t.n_begin; n--) {
      if (n > t.n_begin) keys(t, n - 1);
      values(t, n);
    }
    copy_wait<0>();
    signal();
  }

 private:
  __device__ void keys(const Tile& t, int n) {
    const Params& p = a_.p;
    copy(p.k, p.head_dim, p.k_page, p.k_token, p.k_head, t, n, shared_.k, shared_.k_full, shared_.k_empty, k_at_);
  }
  __device__ void values(const Tile& t, int n) {
    const Params& p = a_.p;
    copy(p.v, p.v_dim, p.v_page, p.v_token, p.v_head, t, n, shared_.v, shared_.v_full, shared_.v_empty, v_at_);
  }

  // Where a token's elements begin.
  __device__ int64_t find(const Tile& t, int token, int64_t page_step, int64_t token_step, int64_t head_step) const {
    if (token >= t.kv_len) return 0;
    const int column = a_.page_shift >= 0 ? token >> a_.page_shift : token / a_.p.page_size;
    const int page = a_.p.page_table[t.row * a_.p.table_row + column];
    return page * page_step + (token - column * a_.p.page_size) * token_step + t.kv_head * head_step;
  }

  template <int kBytes>
  __device__ void copy(const void* data, int dim, int64_t page_step, int64_t token_step, int64_t head_step,
                       const Tile& t, int n, char (&stages)[C::kStages][kBytes], uint64_t* full, uint64_t* empty,
                       hopper::Ring<C::kStages>& ring) {
    constexpr int kChunks = kBytes / C::kBlockN / 16;  // of a row
    const int first = n * C::kBlockN + warp_ * kRows;
    int64_t mine[kPlaces];  // of rows lane, lane + 32, ...
#pragma unroll
    for (int i = 0; i < kPlaces; i++) mine[i] = find(t, first + 32 * i + lane_, page_step, token_step, head_step);
    hopper::barrier_wait(&empty[ring.index], ring.parity ^ 1);
    const uint32_t to = hopper::shared_address(stages[ring.index]);
#pragma unroll 1
    for (int i = lane_; i < kRows * kChunks; i += 32) {
      const int in_warp = i / kChunks, chunk = i % kChunks, row = warp_ * kRows + in_warp;
      int64_t at = 0;
#pragma unroll
      for (int j = 0; j < kPlaces; j++) {
        const int64_t place = __shfl_sync(~0u, mine[j], in_warp % 32);
        if (in_warp / 32 == j) at = place;
      }
      const bool there = first + in_warp < t.kv_len && chunk * kPiece < dim;
      copy_async(to + (chunk / 8 * C::kBlockN + row) * 128 + ((chunk % 8 ^ row % 8) << 4),
                 static_cast<const T*>(data) + (there ? at + chunk * kPiece : 0), there);
    }
    copy_commit();
    copy_wait<1>();
    signal();
    pending_ = &full[ring.index];
    ring.next();
  }

  __device__ void signal() {
    if (!pending_) return;
    hopper::fence_async_shared();
    hopper::barrier_arrive(pending_);
    pending_ = nullptr;
  }

  const Args& a_;
  Shared& shared_;
  int warp_, lane_;
  uint64_t* pending_ = nullptr;
  hopper::Ring<C::kStages> k_at_, v_at_;
};

}  // namespace radix::attention::prefill
