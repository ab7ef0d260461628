// The producer of prefill for pages too small for the copy engine (fewer than 8 tokens to a box): warps gather keys and
// values row by row with cp.async, to where a tensor map would have put them.
#pragma once

#include "cuda/attention/prefill_schedule.h"
#include "cuda/hopper/mbarrier.h"

namespace radix::attention::prefill {

// 16 bytes to shared memory, or zeros.
__device__ inline void copy_async(uint32_t shared, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}

// kGatherers warps, each a share of a block's rows. Page ids are read two blocks ahead; a thread's copies of a block
// arrive at its barrier by themselves, so that only free places hold the gathering up.
template <class C, class Shared>
class Gatherer {
  using T = typename C::T;
  static constexpr int kRows = C::kBlockN / C::kGatherers;  // of a warp
  static constexpr int kPlaces = (kRows + 31) / 32;
  static constexpr int kPiece = 16 / sizeof(T);  // elements of a copy

  // The pages of this warp's rows lane, lane + 32, ... of a block.
  struct Pages {
    int at[kPlaces];
  };

 public:
  __device__ Gatherer(const Args& a, Shared& shared)
      : a_(a), shared_(shared), first_(threadIdx.x / 32 * C::kGatherers / 4 * kRows), lane_(threadIdx.x % 32) {}

  __device__ void gather(const Tile& t) {
    if (t.n_begin == t.n_end) return;
    const Params& p = a_.p;
    int n = t.n_end - 1;
    Pages values = look_up(t, n), keys = look_up(t, n - 1);
    copy(p.k, p.head_dim, p.k_page, p.k_token, p.k_head, t, n, values, shared_.k, shared_.k_full, shared_.k_empty,
         k_at_);
    for (; n >= t.n_begin; n--) {
      const Pages ahead = look_up(t, n - 2);
      if (n > t.n_begin)
        copy(p.k, p.head_dim, p.k_page, p.k_token, p.k_head, t, n - 1, keys, shared_.k, shared_.k_full, shared_.k_empty,
             k_at_);
      copy(p.v, p.v_dim, p.v_page, p.v_token, p.v_head, t, n, values, shared_.v, shared_.v_full, shared_.v_empty,
           v_at_);
      values = keys, keys = ahead;
    }
  }

 private:
  __device__ Pages look_up(const Tile& t, int n) const {
    Pages pages{};
#pragma unroll
    for (int i = 0; i < kPlaces; i++) {
      const int row = 32 * i + lane_, token = n * C::kBlockN + first_ + row;
      if (n < t.n_begin || row >= kRows || token >= t.kv_len) continue;
      pages.at[i] = a_.p.page_table[t.row * a_.p.table_row + page_of(token)];
    }
    return pages;
  }
  __device__ int page_of(int token) const {
    return a_.page_shift >= 0 ? token >> a_.page_shift : token / a_.p.page_size;
  }

  // A lane copies its 16 bytes of one row, of the row kAtOnce further on, and so on.
  template <int kBytes>
  __device__ void copy(const void* data, int dim, int64_t page_step, int64_t token_step, int64_t head_step,
                       const Tile& t, int n, const Pages& pages, char (&stages)[C::kStages][kBytes], uint64_t* full,
                       uint64_t* empty, hopper::Ring<C::kStages>& ring) {
    constexpr int kChunks = kBytes / C::kBlockN / 16, kAtOnce = 32 / kChunks;  // 16-byte pieces of a row; rows
    hopper::barrier_wait(&empty[ring.index], ring.parity ^ 1);
    const int chunk = lane_ % kChunks, token = n * C::kBlockN + first_;
    const bool inside = chunk * kPiece < dim && lane_ < kAtOnce * kChunks;
    const T* from = static_cast<const T*>(data) + t.kv_head * head_step + chunk * kPiece;
    const uint32_t to = hopper::shared_address(stages[ring.index]) + (chunk / 8 * C::kBlockN + first_) * 128;
#pragma unroll
    for (int i = 0; i < kPlaces; i++) {
#pragma unroll 4
      for (int in = 0; in < 32 && 32 * i + in < kRows; in += kAtOnce) {
        const int row = 32 * i + in + lane_ / kChunks % kAtOnce, at = token + row;
        const int64_t page = __shfl_sync(~0u, pages.at[i], row % 32);
        const int slot = a_.page_shift >= 0 ? at & (a_.p.page_size - 1) : at % a_.p.page_size;
        const bool there = inside && at < t.kv_len;
        if (lane_ < kAtOnce * kChunks)
          copy_async(to + row * 128 + ((chunk ^ first_ + row) % 8 << 4),
                     there ? from + page * page_step + slot * token_step : data, there);
      }
    }
    hopper::copy_async_arrive(&full[ring.index]);
    ring.next();
  }

  const Args& a_;
  Shared& shared_;
  int first_, lane_;  // row of a block
  hopper::Ring<C::kStages> k_at_, v_at_;
};

}  // namespace radix::attention::prefill
