// The producer warpgroup of the kernels on wgmma: brings a run's tiles to shared memory.
//
// There are two buffers, for the even and the odd tiles of a segment. A tile is 9 blocks of 64 dimensions in the
// 128-byte swizzle and comes in four slices, each with its own barriers: a slice is fetched anew as soon as its last
// reader is done, and read as soon as it is there. Slices 0 and 2 make the left 256 dimensions, 1 and 3 the right ones,
// with the rotary ones in the last. Pages of 8 tokens and more are copied by TMA, a slice by each warp (in a
// cluster each block fetches half of a tile's tokens for both); others token by token (cp.async).
#pragma once

#include "sm90/common/cluster.cuh"
#include "sm90/common/cp_async.cuh"
#include "sm90/common/tma.cuh"
#include "sm90/mla/run.cuh"

namespace radix::mla {

using sm90::cp_async_16;

constexpr int kBlocks = kKey / 64, kBlockBytes = kTile * 128;  // of 64 dimensions
constexpr int kLeftBlocks = 4;

// The blocks of a slice: [first, last).
constexpr int kSlices = 4;
__host__ __device__ constexpr int slice_first(int slice) {
  return slice % 2 * kLeftBlocks + slice / 2 * 2;
}
__host__ __device__ constexpr int slice_last(int slice) {
  return slice == kSlices - 1 ? kBlocks : slice_first(slice) + 2;
}

static_assert(kBlocks == 2 * kLeftBlocks + 1, "two halves of the latent dimensions, and the rotary ones");
static_assert(slice_last(0) == slice_first(2) && slice_last(2) == kLeftBlocks, "slices 0 and 2 are the left half");
static_assert(slice_first(1) == kLeftBlocks && slice_last(1) == slice_first(3), "slices 1 and 3 the right one");
static_assert(kBlockBytes % sm90::kSwizzleAtom == 0, "swizzled operands");

// Where 16 bytes of a row lie: blocks of 64 dimensions, in the 128-byte swizzle.
__device__ inline uint32_t swizzled_offset(int row, int piece, int block_bytes = kBlockBytes) {
  return piece / 8 * block_bytes + row * 128 + ((piece % 8 ^ row % 8) << 4);
}

// Block: the block's shared memory, with tile[2], full[2][kSlices], empty[2][kSlices].
template <class Block>
class Producer {
 public:
  __device__ Producer(const WgmmaArgs& a, const sm90::TensorMap& map, Block& shared)
      : a_(a),
        map_(map),
        shared_(shared),
        warp_(threadIdx.x / 32 % 4),
        lane_(threadIdx.x % 32),
        rank_(a.sharing > 1 ? sm90::cluster_rank() : 0) {}

  // The tiles of a segment.
  __device__ void fetch(const Segment& s) { a_.box_tokens > 0 ? send(s) : gather(s); }

  __device__ void run(Walk walk) {
    Segment s;
    while (walk.next(s)) fetch(s);
    // The other block of a cluster signals until here, so this one may not end before.
    for (int at = 0; a_.sharing > 1 && at < 2; at++) wait_empty(at, warp_);
  }

 private:
  // Until a slice of tile buffer `at` is free.
  __device__ void wait_empty(int at, int slice) { sm90::barrier_wait(&shared_.empty[at][slice], (use_ >> at & 1) ^ 1); }
  __device__ int page_of(int token) const {
    return a_.page_shift >= 0 ? token >> a_.page_shift : token / a_.p.page_size;
  }

  // A box of the segment: its page, and its first token there.
  struct Box {
    int page, token;
  };

  // By TMA: this warp's slice of each tile. A block of the cluster copies its share of a tile's tokens, 1 <<
  // shift boxes of each block of dimensions, and a lane issues one box of the slice. What takes divisions is made
  // ahead, 32 boxes at a time.
  __device__ void send(const Segment& s) {
    const int share = kTile / a_.sharing, shift = __popc(share / a_.box_tokens - 1);
    const int mine = lane_ & ((1 << shift) - 1), block = slice_first(warp_) + (lane_ >> shift);
    const bool sends = block < slice_last(warp_);
    const uint32_t bytes = (slice_last(warp_) - slice_first(warp_)) * kBlockBytes;
    char* to = shared_.tile[0] + block * kBlockBytes + (rank_ * share + mine * a_.box_tokens) * 128;
    Box boxes = box(s, lane_, shift), next = box(s, 32 + lane_, shift);
    for (int t = 0; t < s.tiles; t++) {
      const int first = t << shift, at = t & 1;
      if (t > 0 && first % 32 == 0) {
        boxes = next;
        next = box(s, first + 32 + lane_, shift);
      }
      const int page = __shfl_sync(~0u, boxes.page, (first + mine) % 32);
      const int token = __shfl_sync(~0u, boxes.token, (first + mine) % 32);
      uint64_t* full = &shared_.full[at][warp_];
      // What was copied here before has come: the next bytes may be announced before there is room for them.
      sm90::barrier_wait(full, (use_ >> at & 1) ^ 1);
      if (lane_ == 0) sm90::barrier_arrive_expect(full, bytes);
      __syncwarp();
      wait_empty(at, warp_);
      if (sends) {
        if (a_.sharing > 1) {
          sm90::tma_multicast_3d(to + at * sizeof(shared_.tile[0]), &map_, full, 3, block * 64, token, page);
        } else {
          sm90::tma_load_3d(to + at * sizeof(shared_.tile[0]), &map_, full, block * 64, token, page);
        }
      }
      __syncwarp();
      use_ ^= 1 << at;
    }
  }
  // Past the row's end a page that does not exist, which arrives as zeros.
  __device__ Box box(const Segment& s, int box, int shift) const {
    const int share = kTile / a_.sharing, tile = box >> shift, within = box & ((1 << shift) - 1);
    const int token = (s.first + tile) * kTile + rank_ * share + within * a_.box_tokens;
    if (tile >= s.tiles || token >= s.kv_len) return {static_cast<int>(a_.p.kv_pages), 0};
    const int column = page_of(token);
    return {a_.p.page_table[s.row * a_.p.table_row + column], token - column * a_.p.page_size};
  }

  // Token by token: warp w has 16 of a tile's. Eight lanes take a line of 128 bytes, and a lane its 16 of all lines of
  // the tokens 4 k + lane / 8.
  __device__ void gather(const Segment& s) {
    const int token = warp_ * 16 + lane_ / 8, piece = lane_ % 8;  // in the tile, for k = 0
    const uint32_t tile = sm90::shared_address(shared_.tile[0]) + swizzled_offset(token, piece);
    const uint32_t odd =
        swizzled_offset(token + 4, piece) - swizzled_offset(token, piece) - 512;  // the swizzle of rows 4 to 7
    int pages[4];
    find(pages, s, token);
    for (int t = 0; t < s.tiles; t++) {
      const int at = t & 1, first = (s.first + t) * kTile + token;
      const char* from[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        const int x = first + 4 * k, in_page = x - page_of(x) * a_.p.page_size;
        from[k] = static_cast<const char*>(a_.p.k) + piece * 16;
        if (x < s.kv_len) from[k] += (pages[k] * a_.p.k_page + in_page * a_.p.k_token) * 2;
      }
      if (t + 1 < s.tiles) find(pages, s, token + (t + 1) * kTile);
      const uint32_t to = tile + at * (kBlocks * kBlockBytes);
#pragma unroll
      for (int slice = 0; slice < kSlices; slice++) {
        wait_empty(at, slice);
#pragma unroll
        for (int block = slice_first(slice); block < slice_last(slice); block++)
#pragma unroll
          for (int k = 0; k < 4; k++)
            cp_async_16(to + block * kBlockBytes + k * 512 + (k % 2 ? odd : 0), from[k] + block * 128,
                        first + 4 * k < s.kv_len);
        sm90::cp_async_mbarrier_arrive(&shared_.full[at][slice]);
      }
      use_ ^= 1 << at;
    }
  }
  // The pages of a lane's tokens, of which `token` is the first, counted from the segment's first.
  __device__ void find(int (&pages)[4], const Segment& s, int token) const {
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const int x = s.first * kTile + token + 4 * k;
      if (x < s.kv_len) pages[k] = a_.p.page_table[s.row * a_.p.table_row + page_of(x)];
    }
  }

  const WgmmaArgs& a_;
  const sm90::TensorMap& map_;
  Block& shared_;
  int warp_, lane_, rank_;
  uint32_t use_ = 0;  // bit `at`: parity of a buffer's present use
};

inline sm90::TensorMap cache_map(const WgmmaArgs& a) {
  const attention::Params& p = a.p;
  const sm90::TileShape shape = {
      3,
      {kKey, static_cast<uint64_t>(p.page_size), static_cast<uint64_t>(p.kv_pages)},
      {sm90::map_stride(p.k_token * 2, p.page_size), sm90::map_stride(p.k_page * 2, p.kv_pages)},
      {64, static_cast<uint32_t>(a.box_tokens), 1}};
  return sm90::make_tensor_map(
      p.k, p.dtype == DType::bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, shape,
      CU_TENSOR_MAP_SWIZZLE_128B);
}

}  // namespace radix::mla
