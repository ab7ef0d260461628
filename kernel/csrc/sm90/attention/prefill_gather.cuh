// The producer of prefill for pages too small for TMA (fewer than 8 tokens to a box): warps gather keys and
// values row by row with cp.async, to where a tensor map would have put them.
#pragma once

#include "sm90/attention/prefill_schedule.cuh"
#include "sm90/common/cp_async.cuh"
#include "sm90/common/mbarrier.cuh"

namespace radix::attention::prefill {

// 16 bytes to shared memory, or zeros.
__device__ inline void gather_16(uint32_t shared, const void* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}

// kGatherers warps, each a share of a block's rows. Where a row begins is found by one lane for all that copy it, page
// ids are read a block ahead, and a copy takes few instructions: a warp alone on its scheduler has nothing else to do
// between them. A thread's copies of a block arrive at its barrier by themselves, so that only free places hold the
// gathering up.
template <class C, class Shared>
class Gatherer {
  using T = typename C::T;
  static constexpr int kRows = C::kBlockN / C::kGatherers;  // of a warp
  static constexpr int kPlaces = (kRows + 31) / 32;
  static constexpr int kBatch = C::kProducerRegisters >= 56 ? 4 : 1;
  static constexpr int kPiece = 16 / sizeof(T);  // elements of a copy
  static_assert(kRows % 4 == 0);

  // The pages of the rows that this lane owns.
  struct Pages {
    int at[kPlaces];
  };
  // Keys or values as they lie in memory; head: of a KV head, in elements.
  struct Source {
    const void* data;
    int dim;
    int64_t head;
    const sm90::CacheStrides& strides;
  };

 public:
  __device__ Gatherer(const Args& a, Shared& shared)
      : a_(a), shared_(shared), first_(threadIdx.x / 32 * C::kGatherers / 4 * kRows), lane_(threadIdx.x % 32) {}

  __device__ void gather(const Tile& t) {
    begin_ = t.n_begin, kv_len_ = t.kv_len, kv_head_ = t.kv_head;
    table_ = a_.p.page_table + t.row * a_.p.table_row;
    int n = t.n_end - 1;
    if (n < begin_) return;
    const Params& p = a_.p;
    Pages pages = look_up(n);
    for (; n >= begin_; n--) {
      const Pages ahead = look_up(n - 1);
      copy({p.k, p.head_dim, p.k_head, a_.k_strides}, n, pages, shared_.k, shared_.k_full, shared_.k_empty, k_at_);
      copy({p.v, p.v_dim, p.v_head, a_.v_strides}, n, pages, shared_.v, shared_.v_full, shared_.v_empty, v_at_);
      pages = ahead;
    }
  }

 private:
  // Eight lanes copy 128 bytes of a row, and the lanes beside them of the next three rows: lane 8 s + i owns the rows
  // 4 i + s of every 32.
  __device__ int row_of(int place) const { return 32 * place + lane_ % 8 * 4 + lane_ / 8; }

  __device__ Pages look_up(int n) const {
    Pages pages{};
#pragma unroll
    for (int i = 0; i < kPlaces; i++) {
      const int token = n * C::kBlockN + first_ + row_of(i);
      if (n >= begin_ && row_of(i) < kRows && token < kv_len_) pages.at[i] = table_[page_of(token)];
    }
    return pages;
  }
  __device__ int page_of(int token) const {
    return a_.page_shift >= 0 ? token >> a_.page_shift : token / a_.p.page_size;
  }
  __device__ int slot_of(int token) const {
    return a_.page_shift >= 0 ? token & (a_.p.page_size - 1) : token % a_.p.page_size;
  }

  template <int kBytes>
  __device__ void copy(const Source& source, int n, const Pages& pages, char (&stages)[C::kStages][kBytes],
                       uint64_t* full, uint64_t* empty, sm90::Ring<C::kStages>& ring) {
    const int token = n * C::kBlockN + first_, valid = kv_len_ - token;
    uint32_t begins[kPlaces];  // of this lane's rows, in units of the strides
#pragma unroll
    for (int i = 0; i < kPlaces; i++) begins[i] = source.strides.offset(pages.at[i], slot_of(token + row_of(i)));
    const char* data = static_cast<const char*>(source.data) + kv_head_ * source.head * int{sizeof(T)} + lane_ % 8 * 16;
    sm90::barrier_wait(&empty[ring.index], ring.parity ^ 1);
    if (valid >= kRows && source.dim * int{sizeof(T)} * C::kBlockN == kBytes) {
      copy_rows<kBytes, false>(data, begins, source, valid, sm90::shared_address(stages[ring.index]));
    } else {
      copy_rows<kBytes, true>(data, begins, source, valid, sm90::shared_address(stages[ring.index]));
    }
    sm90::cp_async_mbarrier_arrive(&full[ring.index]);
    ring.next();
  }

  // Four rows at a time, one column of 128 bytes after the other. A copy reads its address's registers late: addresses
  // of kBatch times four rows have registers of their own, or each would wait for the copies before it. Zeros from row
  // `valid` and from element `source.dim` on.
  template <int kBytes, bool kMask>
  __device__ void copy_rows(const char* data, const uint32_t (&begins)[kPlaces], const Source& source, int valid,
                            uint32_t block) {
    constexpr int kColumns = kBytes / C::kBlockN / 128;
    const int chunk = lane_ % 8, row = lane_ / 8;
    // Rows of 128 bytes; the pieces of row r stand at places ^ r % 8.
    const uint32_t to = block + (first_ + row) * 128 + ((chunk ^ first_ + row) % 8 << 4);
    asm volatile("" : "+l"(data));  // one register pair, not a sum to be made again for each address
#pragma unroll
    for (int first = 0; first < kRows; first += 4 * kBatch) {
      const char* from[kBatch];
#pragma unroll
      for (int at = first; at < min(first + 4 * kBatch, kRows); at += 4)
        from[(at - first) / 4] = source.strides.address(data, __shfl_sync(~0u, begins[at / 32], at % 32 / 4, 8));
#pragma unroll
      for (int at = first; at < min(first + 4 * kBatch, kRows); at += 4)
#pragma unroll
        for (int c = 0; c < kColumns; c++)
          gather_16((to ^ at % 8 << 4) + (c * C::kBlockN + at) * 128, from[(at - first) / 4] + c * 128,
                    !kMask || (at + row < valid && c * C::kRowElements + chunk * kPiece < source.dim));
    }
  }

  const Args& a_;
  Shared& shared_;
  int first_, lane_;  // row of a block
  int begin_, kv_len_, kv_head_;
  const int32_t* table_;
  sm90::Ring<C::kStages> k_at_, v_at_;
};

}  // namespace radix::attention::prefill
