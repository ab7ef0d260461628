// The producer warpgroup for the FP8 cache: it widens tokens on their way to the tiles that producer.cuh describes, so
// that the other warpgroups compute as with a bf16 cache.
//
// A latent value becomes bf16(e4m3 * scale). A slice of a tile is one scale group, 128 dimensions. Four lanes share a
// token and a lane has two: 16 bytes of each block of 64 dimensions, so that eight lanes, two rows of the swizzle,
// write to every bank once. Bytes wait for their place in registers, and pages are looked up a tile before that, from
// row to row without a pause. Of a cluster each block widens half of the tokens and writes them to both, a lane one
// token, with all slices of a tile in registers ahead.
//
// The readers order these writes before the tensor cores' reads (Role::wait_full): a fence here would wait for the
// loads on their way.
#pragma once

#include "sm90/common/convert.cuh"
#include "sm90/common/shared_memory.cuh"
#include "sm90/common/split_state.cuh"
#include "sm90/mla/producer.cuh"

namespace radix::mla {

// Block: as in producer.cuh; the `full` barriers take an arrival of each warp. kEach: tokens of a lane, 2, or 1 where
// two blocks share the work.
template <int kEach, class Block>
class WideningProducer {
  static_assert(kEach == 1 || kEach == 2, "a lane's tokens: of half a tile, or of a whole one");

 public:
  __device__ WideningProducer(const WgmmaArgs& a, Block& shared)
      : a_(a),
        shared_(shared),
        row_((threadIdx.x / 32 % 4 + (kEach == 1 ? sm90::cluster_rank() * 4 : 0)) * (8 * kEach) + threadIdx.x % 32 / 4),
        quarter_(threadIdx.x % 4),
        tile_(sm90::shared_address(shared.tile[0])),
        other_(kEach == 1 ? sm90::remote_address(shared.tile[0], 1 - sm90::cluster_rank()) : 0) {}

  __device__ void run(Walk walk) {
    Tile tile = look(walk);
    Tokens now = locate(tile);
    fetch<0>(now), fetch<1>(now);
    if constexpr (kAhead == kSlices) fetch<2>(now), fetch<3>(now);
    int at = tile.buffer;
    for (tile = look(walk); at >= 0;) {
      const Tokens next = locate(tile);
      const int then = tile.buffer;
      tile = look(walk);
      put<0>(at), fetch<kAhead % kSlices>(kAhead == kSlices ? next : now);
      put<1>(at), fetch<(kAhead + 1) % kSlices>(kAhead == kSlices ? next : now);
      put<2>(at), fetch<(kAhead + 2) % kSlices>(next);
      put<3>(at), fetch<(kAhead + 3) % kSlices>(next);
      now = next;
      use_ ^= 1 << at;
      at = then;
    }
    // The other block signals until here, so this one may not end before.
    for (int slice = 0; kEach == 1 && slice < 2 * kSlices; slice++) wait_empty(slice / kSlices, slice % kSlices);
  }

 private:
  static constexpr int kAhead = kEach == 1 ? kSlices : 2;           // slices in registers
  static constexpr int kScaleAt = kLatent, kRopeAt = kLatent + 16;  // bytes, in a token

  // Of a tile: its buffer, -1 where there is no tile; the pages of this lane's tokens and their places there, -1 past
  // the row's end.
  struct Tile {
    int buffer, page[kEach], token[kEach];
  };
  struct Tokens {
    const char* at[kEach];  // null: past the row's end
  };
  // Of a slice, of both tokens.
  struct Raw {
    uint4 values[2][kEach];  // [block][token]
    float scale[kEach];
  };

  // The run's next tile. What this reads is not waited for before it is used.
  __device__ Tile look(Walk& walk) {
    Tile tile{-1};
    if (t_ == s_.tiles) {
      t_ = 0;
      if (!walk.next(s_)) s_.tiles = 0;
    }
    if (s_.tiles == 0) return tile;
    tile.buffer = t_ & 1;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const int x = (s_.first + t_) * kTile + row_ + 8 * i;
      tile.token[i] = -1;
      if (x >= s_.kv_len) continue;
      const int column = a_.page_shift >= 0 ? x >> a_.page_shift : x / a_.p.page_size;
      tile.page[i] = a_.p.page_table[s_.row * a_.p.table_row + column];
      tile.token[i] = x - column * a_.p.page_size;
    }
    t_++;
    return tile;
  }
  __device__ Tokens locate(const Tile& tile) const {
    Tokens tokens;
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      tokens.at[i] = static_cast<const char*>(a_.p.k) + tile.page[i] * a_.p.k_page + tile.token[i] * a_.p.k_token;
      if (tile.buffer < 0 || tile.token[i] < 0) tokens.at[i] = nullptr;
    }
    return tokens;
  }

  // Not .nc: such loads the compiler moves to where they are used.
  __device__ static uint4 load(const char* from) {
    uint4 x;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "l"(from)
                 : "memory");
    return x;
  }

  template <int kSlice>
  __device__ void fetch(const Tokens& tokens) {
    Raw& raw = raw_[kSlice % kAhead];
#pragma unroll
    for (int i = 0; i < kEach; i++) {
      const char* from = tokens.at[i];
      const bool valid = from != nullptr;
      raw.scale[i] = valid ? *reinterpret_cast<const float*>(from + kScaleAt + slice_first(kSlice) / 2 * 4) : 0.f;
#pragma unroll
      for (int b = 0; b < 2; b++)
        raw.values[b][i] = valid ? load(from + (slice_first(kSlice) + b) * 64 + quarter_ * 16) : uint4{};
#pragma unroll
      for (int b = 0; kSlice == kSlices - 1 && b < 2; b++)
        rope_[b][i] = valid ? load(from + kRopeAt + quarter_ * 32 + b * 16) : uint4{};
    }
  }

  // The slice from registers to buffer `at`.
  template <int kSlice>
  __device__ void put(int at) {
    wait_empty(at, kSlice);
    uint64_t* full = &shared_.full[at][kSlice];
    const uint32_t other_full = kEach == 1 ? sm90::remote_address(full, 1 - sm90::cluster_rank()) : 0;
    const Raw& raw = raw_[kSlice % kAhead];
    const uint32_t to = at * (kBlocks * kBlockBytes) + swizzled_offset(row_, 2 * quarter_);
#pragma unroll
    for (int b = 0; b < 2; b++)
#pragma unroll
      for (int i = 0; i < kEach; i++) {
        const uint4& x = raw.values[b][i];
        const uint32_t offset = to + (slice_first(kSlice) + b) * kBlockBytes + i * 1024;
        store(offset, widened(x.x, x.y, raw.scale[i]), other_full);
        store(offset ^ 16, widened(x.z, x.w, raw.scale[i]), other_full);
      }
#pragma unroll
    for (int i = 0; kSlice == kSlices - 1 && i < kEach; i++) {
      const uint32_t offset = to + (kBlocks - 1) * kBlockBytes + i * 1024;
      store(offset, rope_[0][i], other_full);
      store(offset ^ 16, rope_[1][i], other_full);
    }
    __syncwarp();
    if (threadIdx.x % 32 != 0) return;
    if (kEach == 1 && threadIdx.x / 32 % 4 == 0) {
      sm90::barrier_arrive_expect(full, (slice_last(kSlice) - slice_first(kSlice)) * (kBlockBytes / 2));
    } else {
      sm90::barrier_arrive(full);
    }
  }
  // Until a slice of tile buffer `at` is free.
  __device__ void wait_empty(int at, int slice) { sm90::barrier_wait(&shared_.empty[at][slice], (use_ >> at & 1) ^ 1); }
  // To this block's tile, and to the other's if they share the work.
  __device__ void store(uint32_t offset, const uint4& x, uint32_t other_full) {
    sm90::store_shared_uint4(tile_ + offset, x);
    if constexpr (kEach == 1) sm90::store_async(other_ + offset, x, other_full);
  }
  // Eight values.
  __device__ static uint4 widened(uint32_t low, uint32_t high, float scale) {
    using sm90::widen_e4m3_pair;
    return {scaled(widen_e4m3_pair<false>(low), scale), scaled(widen_e4m3_pair<true>(low), scale),
            scaled(widen_e4m3_pair<false>(high), scale), scaled(widen_e4m3_pair<true>(high), scale)};
  }
  // Two values, given as f16.
  __device__ static uint32_t scaled(uint32_t halves, float scale) {
    float x, y;
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.f32.f16 %0, a;\ncvt.f32.f16 %1, b;\n}"
        : "=f"(x), "=f"(y)
        : "r"(halves));
    return sm90::round_pair<bf16>(x * scale, y * scale);
  }

  const WgmmaArgs& a_;
  Block& shared_;
  Segment s_{};            // where look() is
  int t_ = 0;              // and the segment's next tile
  int row_, quarter_;      // of this lane's first token in a tile; which 16 of 64 bytes it has
  uint32_t tile_, other_;  // addresses of this block's first tile buffer and the other block's
  uint32_t use_ = 0;       // bit `at`: parity of a buffer's present use
  Raw raw_[kAhead];
  uint4 rope_[2][kEach];
};

}  // namespace radix::mla
