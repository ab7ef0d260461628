// What follows the experts' products over packed weights: bias, activation, and the way to memory.
#pragma once

#include "sm90/common/convert.cuh"
#include "sm90/common/ldmatrix.cuh"
#include "sm90/common/mbarrier.cuh"
#include "sm90/experts/grouped_mixed_tile.cuh"
#include "sm90/experts/mixed_ends.cuh"

namespace radix::experts {

// Of one warpgroup: 64 features of all pairs of a tile; where gated of half of them, the first half for the gate's
// warpgroup.
template <class Tile>
class GroupedMixedEpilogue {
 public:
  using T = typename Tile::T;

  __device__ GroupedMixedEpilogue(const GroupedMixedParams& p, char* memory, int group)
      : p_(p),
        memory_(sm90::shared_address(memory)),
        staging_(memory_ + group * Tile::Staging::kStagingBytes),
        group_(group),
        warp_(threadIdx.x % 128 / 32),
        lane_(threadIdx.x % 32) {}

  template <int kColumns>
  __device__ void store(const TilePlace& at, float (&sum)[kColumns / 2]) const {
    add_bias(at, sum);
    if constexpr (Tile::kGated) {
      constexpr int kHalf = kColumns / 4;  // accumulators
      float act[kHalf];
      exchange<kHalf>(sum, act);
      write<kHalf>(at, act, group_ * (kColumns / 2));
    } else {
      write<kColumns / 2>(at, sum, 0);
    }
  }

 private:
  template <int kCount>
  __device__ void add_bias(const TilePlace& at, float (&sum)[kCount]) const {
    if (!p_.bias.data) return;
    const int row = at.row_tile * Tile::kFeatures + group_ * p_.weights.second_row + warp_ * 16 + lane_ / 4;
    const float low = bias(at.expert, row), high = bias(at.expert, row + 8);
#pragma unroll
    for (int i = 0; i < kCount; i++) sum[i] += i % 4 < 2 ? low : high;
  }
  __device__ float bias(int expert, int row) const {
    if (row >= p_.rows) return 0;
    return bias_at<T>(p_.bias, int64_t{expert} * p_.rows + row);
  }

  // The same thread of each warpgroup has gate and up of the same feature and pairs: the gate's hands over its second
  // half, the other its first.
  template <int kHalf>
  __device__ void exchange(const float (&sum)[2 * kHalf], float (&act)[kHalf]) const {
    const int thread = threadIdx.x % 128;
    const auto slot = [&](int of, int i) { return memory_ + ((of * kHalf + i) * 128 + thread) * 4; };
    sm90::named_barrier(kBothGroups, 256);  // what was staged has been read
#pragma unroll
    for (int i = 0; i < kHalf; i++) sm90::store_shared_float(slot(group_, i), group_ == 0 ? sum[kHalf + i] : sum[i]);
    sm90::named_barrier(kBothGroups, 256);
#pragma unroll
    for (int i = 0; i < kHalf; i++) {
      const float other = sm90::load_shared_float(slot(1 - group_, i));
      act[i] = group_ == 0 ? activated(p_.activation, sum[i], other) : activated(p_.activation, other, sum[kHalf + i]);
    }
    sm90::named_barrier(kBothGroups, 256);  // now it is for staging
  }

  // Results of pairs `begin` and on, from the accumulators' layout to rows.
  template <int kCount>
  __device__ void write(const TilePlace& at, const float (&result)[kCount], int begin) const {
    using sm90::round_pair;
    constexpr int kBlocks = kCount / 4;  // of 8 pairs
    const int column = at.row_tile * Tile::kFeatures + (Tile::kGated ? 0 : group_ * linear::kTileRows);
#pragma unroll
    for (int first = 0; first < kBlocks; first += Tile::Staging::kStaged / 8) {
      const int count = min(Tile::Staging::kStaged, at.count - begin - first * 8);
      if (count <= 0) break;
      sm90::named_barrier(1 + group_, 128);  // the pieces before have been read
#pragma unroll
      for (int c = first; c < min(first + Tile::Staging::kStaged / 8, kBlocks); c++) {
        const float* d = result + c * 4;
        sm90::stmatrix_x2_trans(staged((c - first) * 8 + lane_ % 8, warp_ * 2 + lane_ / 8 % 2),
                                round_pair<T>(d[0], d[1]), round_pair<T>(d[2], d[3]));
      }
      sm90::named_barrier(1 + group_, 128);
      for (int i = threadIdx.x % 128; i < min(count, kBlocks * 8) * kPieces; i += 128) {
        const int pair = i / kPieces, piece = i % kPieces;
        if (column + piece * 8 >= p_.n) continue;
        const int place = at.begin + begin + first * 8 + pair;
        const int64_t row = Tile::kGated ? place : p_.sorted[place];
        *reinterpret_cast<uint4*>(p_.out + (row * p_.n + column + piece * 8) * 2) =
            sm90::load_shared_uint4(staged(pair, piece));
      }
    }
  }

  static constexpr int kPieces = Tile::Staging::kPieces, kBothGroups = 3;

  // Where a piece of a pair's row is staged, so that neighbouring pairs meet in no bank.
  __device__ uint32_t staged(int pair, int piece) const {
    return staging_ + (pair * kPieces + (piece ^ pair % 8)) * 16;
  }

  const GroupedMixedParams& p_;
  const uint32_t memory_, staging_;
  const int group_, warp_, lane_;
};

}  // namespace radix::experts
