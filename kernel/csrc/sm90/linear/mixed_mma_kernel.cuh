// out[m, n] = x[m, k] * weight[n, k]^T for up to 64 tokens and a packed weight (layout.cuh), on mma.sync. Bound by
// bytes: the weight is read once.
//
// The weight's 16 rows of a strip are the product's rows and 8 tokens its columns.
//
// clang-format off
//   block          a tile of up to kRowWarps * kUnits strips at a time, persistent over tiles
//   consumer warp  (r, q) multiplies kUnits strips with tiles q, q + kKWarps, ... of k: codes and scales by cp.async into
//                  slots of its own, kDepth ahead; widened in registers
//   producer       x by TMA, [kTokens, 64 of k] for each q, into a ring of stages that all consumers read
//   epilogue       sums of the kKWarps warps of a strip meet in shared memory and are added in the order of q
// clang-format on
//
// A sum over one tile of k (over a half of it where groups are of 32) is multiplied by its scale and added to the sum
// of its strip, in float32, in ascending order. That order depends on kKWarps alone, which follows from n.
//
// Shared memory (dynamic, and static barriers):
//
//   | x        | kXStages x kKWarps x [kTokens, 128 bytes], swizzled                            |
//   | partials | [kKWarps][kTokens][kColumnStep] floats                                         |
//   | slots    | consumer warps x kDepth x { codes [kUnits], numbers [kUnits][2 halves of k] }  |
//
// Numbers of a half are 16 scales, then 16 zero points.
#pragma once

#include <algorithm>

#include "sm90/common/cp_async.cuh"
#include "sm90/common/ldmatrix.cuh"
#include "sm90/common/limits.cuh"
#include "sm90/common/mma_m16n8k16.cuh"
#include "sm90/common/pdl.cuh"
#include "sm90/common/tma.cuh"
#include "sm90/gemm/epilogue.cuh"
#include "sm90/linear/scales.cuh"

namespace radix::linear {

using gemm::Epilogue;
using gemm::Gate;

// Strips are counted in units: a strip, or (Gate::halves) a strip of gates and its strip of ups.
struct MixedParams {
  const char *codes, *scales, *zeros;  // zeros may be null
  int64_t k_tiles, groups;
  DType scale_type;
  int scale_bytes;
  int group_shift;   // log2 of a group's inputs; of whole rows 31
  bool fold_halves;  // groups of 32
  int m, columns;    // columns of the result
  int units, tile_units, tiles;
  int up_strips;  // from a strip of gates to its ups, else 0
  bool static_weight;
  Epilogue epilogue;
};

constexpr int kMostXStages = 16;

template <Code kCode_, int kTokens_, int kRowWarps_, int kKWarps_, int kUnits_, int kDepth_>
struct MixedTile {
  static constexpr Code kCode = kCode_;
  static constexpr int kTokens = kTokens_, kRowWarps = kRowWarps_, kKWarps = kKWarps_, kUnits = kUnits_;
  static constexpr int kDepth = kDepth_;
  static constexpr int kStrips = kRowWarps * kUnits;
  static constexpr int kWarps = kRowWarps * kKWarps, kConsumers = kWarps * 32, kThreads = kConsumers + 32;
  static constexpr int kCodeBytes = strip_bytes(kCode);
  // Of 16 scales, and with their zero points.
  static constexpr int kScaleBytes = kCode == Code::e2m1 ? 16 : 64;
  static constexpr int kNumberBytes = kScaleBytes + (kCode == Code::u4 ? 16 : 0);
  static constexpr int kSlotBytes = kUnits * (kCodeBytes + 2 * kNumberBytes);
  static constexpr int kXBytes = kTokens * 128, kXStageBytes = kKWarps * kXBytes;
  static constexpr int kColumnStep = kStrips * 16 + 4;  // floats of a token; 4: banks
  static constexpr int kPartialBytes = kKWarps * kTokens * kColumnStep * 4;
  // As many stages of x as there is room for: all warps wait for each, and one takes as long to come as codes from
  // memory.
  static constexpr int kFixedBytes = kPartialBytes + kWarps * kDepth * kSlotBytes + 1024;
  static constexpr int kXStages =
      std::min(kMostXStages, (sm90::kMaxSharedBytes - kFixedBytes) / (kXStageBytes + 2 * 8));
  static constexpr int kSharedBytes = kXStages * kXStageBytes + kFixedBytes;
  static_assert(kXStages >= 4, "x is loaded ahead of the products");
  static_assert(kTokens % 8 == 0 && kTokens >= 8 && kTokens <= 64, "columns of the product, and a TMA box");
  static_assert(kUnits * 2 * (kScaleBytes / 16 + 1) <= 32, "a lane for each 16 bytes of numbers");
  static_assert(kUnits == 1 || kUnits == 2, "a gate strip and its up strip are one warp's, or neighbours'");
  static_assert(kStrips % 2 == 0, "a gate strip and its up strip are in one tile");
  static_assert(kThreads <= sm90::kMaxThreads && kXBytes % sm90::kSwizzleAtom == 0 && kPartialBytes % 16 == 0);
  static_assert(sm90::shared_fits(kSharedBytes + 2 * kXStages * 8), "the barriers are static");
};

template <class Tile>
struct MixedShared {
  char* x;                 // [kXStages][kKWarps][kTokens, 128 bytes]
  float* partials;         // [kKWarps][kTokens][kColumnStep]
  char* slots;             // [kWarps][kDepth]
  uint64_t *full, *empty;  // [kXStages]
};

// Rounds of a tile: warp q multiplies tile i * kKWarps + q of k in round i.
template <class Tile>
__device__ inline int rounds_of(const MixedParams& p) {
  return static_cast<int>((p.k_tiles + Tile::kKWarps - 1) / Tile::kKWarps);
}

template <class Tile>
class MixedProducer {
 public:
  __device__ static void run(const MixedParams& p, const MixedShared<Tile>& s, const sm90::TensorMap* x_map) {
    sm90::pdl_wait();
    sm90::Ring<Tile::kXStages> ring;
    const int rounds = rounds_of<Tile>(p);
    for (int tile = blockIdx.x; tile < p.tiles; tile += gridDim.x)
      for (int i = 0; i < rounds; i++, ring.next()) {
        uint64_t* full = &s.full[ring.index];
        sm90::barrier_wait(&s.empty[ring.index], ring.parity ^ 1);
        const int first = i * Tile::kKWarps, count = min(Tile::kKWarps, static_cast<int>(p.k_tiles) - first);
        sm90::barrier_arrive_expect(full, count * Tile::kXBytes);
        char* to = s.x + ring.index * Tile::kXStageBytes;
        for (int q = 0; q < count; q++) sm90::tma_load_2d(to + q * Tile::kXBytes, x_map, full, (first + q) * kTileK, 0);
      }
  }
};

// A warp's position on its way through its tiles of k, kDepth ahead of what it multiplies, and what it copies there.
template <class Tile>
class MixedSource {
 public:
  __device__ MixedSource(const MixedParams& p, int row_warp, int k_warp, char* slots)
      : p_(p),
        row_warp_(row_warp),
        k_warp_(k_warp),
        lane_(threadIdx.x % 32),
        slots_(sm90::shared_address(slots)),
        rounds_(rounds_of<Tile>(p)) {
    const int pieces = p.scale_bytes + (p.zeros ? 1 : 0), halves = p.fold_halves ? 2 : 1;
    copies_numbers_ = lane_ < Tile::kUnits * halves * pieces;
    unit_ = copies_numbers_ ? lane_ / (halves * pieces) : 0;
    half_ = lane_ / pieces % halves;
    piece_ = lane_ % pieces;
    is_zero_ = piece_ == p.scale_bytes;
    number_to_ = Tile::kUnits * Tile::kCodeBytes + (unit_ * 2 + half_) * Tile::kNumberBytes +
                 (is_zero_ ? Tile::kScaleBytes : piece_ * 16);
    begin(blockIdx.x);
  }

  // The strips of tile `tile` that this warp has.
  __device__ static int strip_of(const MixedParams& p, int tile, int slot) {
    const int first = tile * p.tile_units, here = min(p.tile_units, p.units - first);
    const int unit = p.up_strips ? slot / 2 : slot;
    if (unit >= here) return -1;
    return first + unit + (p.up_strips && slot % 2 ? p.up_strips : 0);
  }

  // Copies the next round into `slot`; past the last one, nothing.
  __device__ void next(int slot) {
    const int64_t k_tile = int64_t{round_} * Tile::kKWarps + k_warp_;
    if (tile_ < p_.tiles && k_tile < p_.k_tiles) copy(slots_ + slot * Tile::kSlotBytes, k_tile);
    sm90::cp_async_commit();
    if (++round_ == rounds_) {
      round_ = 0;
      begin(tile_ + gridDim.x);
    }
  }

 private:
  __device__ void begin(int tile) {
    tile_ = tile;
    if (tile >= p_.tiles) return;
#pragma unroll
    for (int u = 0; u < Tile::kUnits; u++) {
      strip_[u] = strip_of(p_, tile, row_warp_ * Tile::kUnits + u);
      codes_[u] = p_.codes + (strip_[u] / 4 * p_.k_tiles) * tile_bytes(Tile::kCode) + strip_[u] % 4 * Tile::kCodeBytes +
                  lane_ * 16;
    }
    const int strip = unit_ == 0 ? strip_[0] : strip_[Tile::kUnits - 1];  // no index: strip_ stays in registers
    const int64_t at = strip / 4 * p_.groups * kTileRows + strip % 4 * kStripRows;
    numbers_ = is_zero_ ? p_.zeros + at : p_.scales + at * p_.scale_bytes + piece_ * 16;
    has_numbers_ = copies_numbers_ && strip >= 0;
  }

  __device__ void copy(uint32_t to, int64_t k_tile) const {
#pragma unroll
    for (int u = 0; u < Tile::kUnits; u++) {
      if (strip_[u] < 0) continue;
      const char* from = codes_[u] + k_tile * tile_bytes(Tile::kCode);
#pragma unroll
      for (int at = 0; at < Tile::kCodeBytes; at += 512)
        sm90::cp_async_16(to + u * Tile::kCodeBytes + at + lane_ * 16, from + at);
    }
    if (!has_numbers_) return;
    const int64_t group = min((k_tile * kTileK + half_ * 32) >> p_.group_shift, p_.groups - 1);
    sm90::cp_async_16(to + number_to_, numbers_ + group * kTileRows * (is_zero_ ? 1 : p_.scale_bytes));
  }

  const MixedParams& p_;
  const int row_warp_, k_warp_, lane_;
  const uint32_t slots_;
  const int rounds_;
  int tile_, round_ = 0;
  int strip_[Tile::kUnits];
  const char* codes_[Tile::kUnits];
  // The 16 bytes of scales or zero points that this lane copies each round.
  bool copies_numbers_, has_numbers_ = false, is_zero_;
  int unit_, half_, piece_, number_to_;
  const char* numbers_;
};

template <class T, class Tile>
class MixedConsumer {
 public:
  static constexpr int kUnits = Tile::kUnits, kColumns = Tile::kTokens / 8;
  static constexpr Code kCode = Tile::kCode;

  __device__ MixedConsumer(const MixedParams& p, const MixedShared<Tile>& s)
      : p_(p),
        s_(s),
        lane_(threadIdx.x % 32),
        row_warp_(threadIdx.x / 32 / Tile::kKWarps),
        k_warp_(threadIdx.x / 32 % Tile::kKWarps),
        x_at_((lane_ % 8) * 128 + ((lane_ / 8) ^ (lane_ % 8)) * 16) {}

  __device__ void run() {
    char* slots = s_.slots + (row_warp_ * Tile::kKWarps + k_warp_) * Tile::kDepth * Tile::kSlotBytes;
    if (!p_.static_weight) sm90::pdl_wait();
    MixedSource<Tile> source(p_, row_warp_, k_warp_, slots);
#pragma unroll 1
    for (int i = 0; i < Tile::kDepth; i++) source.next(i);
    if (p_.static_weight) sm90::pdl_wait();
    const int rounds = rounds_of<Tile>(p_);
    sm90::Ring<Tile::kXStages> ring;
    int slot = 0;
    for (int tile = blockIdx.x; tile < p_.tiles; tile += gridDim.x) {
      clear();
      const bool has_rows = MixedSource<Tile>::strip_of(p_, tile, row_warp_ * kUnits) >= 0;
#pragma unroll 1
      for (int i = 0; i < rounds; i++) {
        sm90::cp_async_wait<Tile::kDepth - 1>();
        __syncwarp();
        sm90::barrier_wait(&s_.full[ring.index], ring.parity);
        const bool has_k = int64_t{i} * Tile::kKWarps + k_warp_ < p_.k_tiles;
        if (has_rows && has_k)
          multiply(slots + slot * Tile::kSlotBytes, s_.x + ring.index * Tile::kXStageBytes + k_warp_ * Tile::kXBytes);
        __syncwarp();
        sm90::barrier_arrive_warp(&s_.empty[ring.index]);
        source.next(slot);
        slot = slot + 1 == Tile::kDepth ? 0 : slot + 1;
        ring.next();
      }
      store_partials();
      sm90::named_barrier(1, Tile::kConsumers);
      finish(tile);
      sm90::named_barrier(1, Tile::kConsumers);
    }
  }

 private:
  __device__ void clear() {
#pragma unroll
    for (int u = 0; u < kUnits; u++)
#pragma unroll
      for (int j = 0; j < kColumns; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) sum_[u][j][i] = part_[u][j][i] = 0;
  }

  // Scales and zero points of rows g and g + 8 in one half of the tile's k.
  __device__ void load_numbers(const char* slot, int half) {
    const int g = lane_ / 4;
#pragma unroll
    for (int u = 0; u < kUnits; u++) {
      const char* numbers = slot + kUnits * Tile::kCodeBytes + (u * 2 + half) * Tile::kNumberBytes;
#pragma unroll
      for (int i = 0; i < 2; i++) {
        scale_[u][i] = scale_at<kCode>(numbers, p_.scale_type, g + 8 * i);
        if constexpr (kCode == Code::u4) {
          const auto* zeros = reinterpret_cast<const uint8_t*>(numbers + Tile::kScaleBytes);
          zero_[u][i] = zero_pair<T>(p_.zeros ? zeros[g + 8 * i] : 8);
        }
      }
    }
  }

  // Operand A of two steps, from one half of the tile's k.
  __device__ void widen_half(const char* codes, int half, const uint32_t (&zero)[2], uint32_t (&a)[2][4]) const {
    if constexpr (code_bits(kCode) == 4) {
      const uint2 words = *reinterpret_cast<const uint2*>(codes + lane_ * 16 + half * 8);
      widen_step<T, kCode>({words.x}, zero, a[0]);
      widen_step<T, kCode>({words.y}, zero, a[1]);
    } else {
      const uint4 words = *reinterpret_cast<const uint4*>(codes + half * 512 + lane_ * 16);
      widen_step<T, kCode>({words.x, words.y}, zero, a[0]);
      widen_step<T, kCode>({words.z, words.w}, zero, a[1]);
    }
  }

  __device__ void multiply(const char* slot, const char* x) {
    const uint32_t x_from = sm90::shared_address(x) + x_at_;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      if (half == 0 || p_.fold_halves) load_numbers(slot, half);
      uint32_t a[kUnits][2][4];
#pragma unroll
      for (int u = 0; u < kUnits; u++) widen_half(slot + u * Tile::kCodeBytes, half, zero_[u], a[u]);
#pragma unroll
      for (int j = 0; j < kColumns; j++) {
        uint32_t b[4];
        sm90::ldmatrix_x4(b, (x_from ^ (half * 64)) + j * 1024);
#pragma unroll
        for (int u = 0; u < kUnits; u++) {
          sm90::mma<T>(part_[u][j], a[u][0], b[0], b[1]);
          sm90::mma<T>(part_[u][j], a[u][1], b[2], b[3]);
        }
      }
      if (half == 1 || p_.fold_halves) fold();
    }
  }

  __device__ void fold() {
#pragma unroll
    for (int u = 0; u < kUnits; u++)
#pragma unroll
      for (int j = 0; j < kColumns; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          sum_[u][j][i] = fmaf(scale_[u][i / 2], part_[u][j][i], sum_[u][j][i]);
          part_[u][j][i] = 0;
        }
  }

  __device__ void store_partials() const {
    float* to = s_.partials + k_warp_ * Tile::kTokens * Tile::kColumnStep;
#pragma unroll
    for (int u = 0; u < kUnits; u++)
#pragma unroll
      for (int j = 0; j < kColumns; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int token = j * 8 + lane_ % 4 * 2 + i % 2, row = (row_warp_ * kUnits + u) * 16 + lane_ / 4 + i / 2 * 8;
          to[token * Tile::kColumnStep + row] = sum_[u][j][i];
        }
  }

  // The sums of 8 rows of the tile, `step` apart, in the order of the warps.
  __device__ void add_up(float (&v)[8], int token, int row, int step) const {
    const float* from = s_.partials + token * Tile::kColumnStep + row;
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = from[j * step];
#pragma unroll
    for (int q = 1; q < Tile::kKWarps; q++)
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] += from[q * Tile::kTokens * Tile::kColumnStep + j * step];
  }

  // 8 results of a token at a time.
  __device__ void finish(int tile) const {
    const Epilogue& e = p_.epilogue;
    const int first = tile * p_.tile_units, here = min(p_.tile_units, p_.units - first);
    const int of_unit = e.gate == Gate::interleaved ? 1 : 2, pieces = here * of_unit;  // pieces of 8 columns
    for (int i = threadIdx.x; i < p_.m * pieces; i += Tile::kConsumers) {
      const int token = i / pieces, piece = i % pieces, column = first * of_unit * 8 + piece * 8;
      const int count = min(8, p_.columns - column);
      if (count <= 0) continue;
      float v[8];
      if (e.gate == Gate::none) {
        add_up(v, token, piece * 8, 1);
        gemm::finish_eight<T>(e, v, token, column, 1, count);
      } else {
        finish_gated(v, token, piece, column, count);
      }
      gemm::store_eight<T>(e, v, token, column, count);
    }
  }

  __device__ void finish_gated(float (&v)[8], int token, int piece, int column, int count) const {
    const Epilogue& e = p_.epilogue;
    const bool halves = e.gate == Gate::halves;
    const int row = halves ? piece / 2 * 32 + piece % 2 * 8 : piece * 16, step = halves ? 1 : 2;
    const int weight_row = halves ? column : 2 * column;
    float up[8];
    add_up(v, token, row, step);
    add_up(up, token, row + (halves ? 16 : 1), step);
    gemm::finish_eight<T>(e, v, token, weight_row, step, count);
    gemm::finish_eight<T>(e, up, token, weight_row + (halves ? p_.columns : 1), step, count);
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = gemm::silu(v[j]) * up[j];
  }

  const MixedParams& p_;
  const MixedShared<Tile>& s_;
  const int lane_, row_warp_, k_warp_, x_at_;
  float sum_[kUnits][kColumns][4], part_[kUnits][kColumns][4];
  float scale_[kUnits][2];
  uint32_t zero_[kUnits][2];
};

template <class T, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    mixed_mma_kernel(const __grid_constant__ sm90::TensorMap x_map, const __grid_constant__ MixedParams p) {
  extern __shared__ char dynamic[];
  __shared__ uint64_t full[Tile::kXStages], empty[Tile::kXStages];
  char* base = dynamic + (-sm90::shared_address(dynamic) & 1023);
  MixedShared<Tile> s;
  s.x = base;
  s.partials = reinterpret_cast<float*>(base + Tile::kXStages * Tile::kXStageBytes);
  s.slots = reinterpret_cast<char*>(s.partials) + Tile::kPartialBytes;
  s.full = full;
  s.empty = empty;
  sm90::pdl_trigger();
  if (threadIdx.x == 0) {
    for (int i = 0; i < Tile::kXStages; i++) {
      sm90::barrier_init(&full[i], 1);
      sm90::barrier_init(&empty[i], Tile::kWarps * sm90::kWarpArrivals);
    }
    sm90::barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < Tile::kConsumers) {
    MixedConsumer<T, Tile>(p, s).run();
  } else if (threadIdx.x == Tile::kConsumers) {
    MixedProducer<Tile>::run(p, s, &x_map);
  }
}

}  // namespace radix::linear
