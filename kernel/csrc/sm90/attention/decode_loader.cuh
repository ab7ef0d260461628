// The copies of decode: what a warp asks for, how far ahead, and where it lies in shared memory.
#pragma once

#include "sm90/attention/decode.cuh"
#include "sm90/common/cp_async.cuh"

namespace radix::attention::decode {

// Where a 16-byte piece of a token lies within its unit: the pieces of 8 neighbouring tokens are in different banks.
template <class C>
__device__ inline uint32_t place_of(int token, int piece) {
  constexpr int kRowsOfLine = C::kRowBytes < 128 ? 128 / C::kRowBytes : 1;
  constexpr int kMask = (C::kRowPieces < 8 ? C::kRowPieces : 8) - 1;
  return token * C::kRowBytes + (piece ^ (token / kRowsOfLine & kMask)) * 16;
}

__device__ inline int page_of(const Args& a, int token) {
  return a.page_shift >= 0 ? token >> a.page_shift : token / a.p.page_size;
}

// Page ids of a warp's tokens in a chunk, two for each lane in the order of its steps, so that only the first step
// waits for them.
template <class C>
class PageIds {
  static constexpr int kSteps = kChunkTokens / C::kTokens / C::kWarps;  // of a warp in a whole chunk
  static_assert(kSteps * C::kTokens == 64 || !C::kPagesOfChunk, "two page ids a lane");

 public:
  __device__ void ask(const Args& a, const Chunk& c, int warp) {
    const int32_t* table = a.p.page_table + (a.first_row + c.row) * a.p.table_row;
    const auto id = [&](int i) {
      const int at = i * 32 + threadIdx.x % 32, step = at / C::kTokens * C::kWarps + warp;
      const int token = (c.begin & -kChunkTokens) + step * C::kTokens + at % C::kTokens;
      return token >= c.begin && token < c.end ? table[page_of(a, token)] : 0;
    };
    first_ = id(0), second_ = id(1);
  }
  // Of this lane's token in a step.
  __device__ int of(int step) const {
    const int at = step / C::kWarps % kSteps * C::kTokens;
    return __shfl_sync(~0u, at < 32 ? first_ : second_, at % 32 + threadIdx.x % C::kTokens);
  }

 private:
  int first_ = 0, second_ = 0;
};

// The part of a warp that asks for memory: runs ahead of the arithmetic by kUnits units.
template <class C>
class Loader {
 public:
  __device__ Loader(const Args& a, const Plan& plan, uint32_t ring, int warp, int kv_head, int x, int x_end)
      : a_(a), plan_(plan), ring_(ring), warp_(warp), x_(x), x_end_(x_end), row_(plan.row_of(x)) {
    k_ = static_cast<const char*>(a.p.k) + kv_head * a.p.k_head * sizeof(typename C::KV);
    v_ = static_cast<const char*>(a.p.v) + kv_head * a.p.v_head * sizeof(typename C::KV);
    enter_chunk();
    settle();
  }

  // Asks for unit i of all this warp's, even ones K and odd ones V; an empty group when there is none.
  template <bool kValues>
  __device__ void next() {
    if (x_ < x_end_) {
      const uint32_t unit = ring_ + slot_ * C::kUnitBytes;
      if constexpr (kValues) {
        copy(unit, v_, a_.v_strides);
        step_ += C::kWarps;
        settle();
      } else {
        if constexpr (C::kPagesOfChunk) page_ = pages_.of(step_);
        copy(unit, k_, a_.k_strides);
      }
    }
    slot_ = slot_ + 1 == C::kUnits ? 0 : slot_ + 1;
    cp_async_commit();
  }

 private:
  __device__ void enter_chunk() {
    const Chunk c = locate(plan_, x_, row_);
    begin_ = c.begin, end_ = c.end;
    const int first = c.begin / C::kTokens;
    step_ = first + (warp_ - first & C::kWarps - 1);
    if constexpr (C::kPagesOfChunk) pages_.ask(a_, c, warp_);
  }
  // Moves on to a chunk in which this warp has a step, and asks for the page ids of that step.
  __device__ void settle() {
    while (step_ * C::kTokens >= end_) {
      if (++x_ >= x_end_) return;
      enter_chunk();
    }
    const int token = step_ * C::kTokens + threadIdx.x % C::kTokens;
    const bool valid = token >= begin_ && token < end_;
    valid_ = __ballot_sync(~0u, valid);
    const int page = page_of(a_, token);
    in_page_ = token - page * a_.p.page_size;
    if constexpr (!C::kPagesOfChunk) {
      page_ = 0;
      if (valid) page_ = a_.p.page_table[(a_.first_row + row_) * a_.p.table_row + page];
    }
  }
  // Each copy of the warp takes 512 bytes: some rows, each as a whole.
  __device__ void copy(uint32_t unit, const char* from, const CacheStrides& strides) {
    constexpr int kRowsAtOnce = 32 / C::kRowPieces;
    const int lane = threadIdx.x % 32, piece = lane % C::kRowPieces;
    const uint32_t mine = strides.offset(page_, in_page_);
    from += piece * 16;
    const auto each = [&](const auto& copy_row) {
#pragma unroll
      for (int i = 0; i < C::kTokens / kRowsAtOnce; i++) {
        const int token = i * kRowsAtOnce + lane / C::kRowPieces;
        copy_row(unit + place_of<C>(token, piece), strides.address(from, __shfl_sync(~0u, mine, token)), token);
      }
    };
    if (valid_ == kAll && a_.p.head_dim == C::kDim) {
      each([](uint32_t to, const char* row, int) { cp_async_16(to, row); });
    } else {
      const bool inside = piece * C::kVec < a_.p.head_dim;
      each([&](uint32_t to, const char* row, int token) { cp_async_16(to, row, inside && (valid_ >> token & 1)); });
    }
  }

  // Lanes beyond a step's tokens repeat them.
  static constexpr uint32_t kAll = ~0u;
  const Args& a_;
  const Plan& plan_;
  const char *k_, *v_;
  uint32_t ring_, valid_ = 0;
  int warp_, x_, x_end_, row_, step_ = 0, begin_ = 0, end_ = 0, slot_ = 0;
  int page_ = 0, in_page_ = 0;
  PageIds<C> pages_;
};

}  // namespace radix::attention::decode
