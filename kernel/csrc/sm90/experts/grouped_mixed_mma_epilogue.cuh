// The end of a grouped_mixed_mma tile: bias, activation, and the way to memory.
#pragma once

#include "sm90/common/convert.cuh"
#include "sm90/experts/grouped_mixed_mma_tile.cuh"
#include "sm90/experts/mixed_ends.cuh"
#include "sm90/linear/mixed_mma_epilogue.cuh"

namespace radix::experts {

template <class T, class Tile>
class GroupedMixedMmaEpilogue : public linear::MixedPartials<Tile> {
 public:
  __device__ GroupedMixedMmaEpilogue(const GroupedMixedMmaParams& p, const GroupedMixedMmaWalk<Tile>& walk,
                                     float* partials)
      : linear::MixedPartials<Tile>(partials), p_(p), walk_(walk) {}

  // All results of the tile, kPiece of a pair at a time, by all consumers.
  __device__ void finish(int tile) const {
    const int pieces = walk_.units(tile) * kPieces, first = walk_.first_unit(tile) * linear::kStripRows;
    const int all = walk_.pairs(tile) * pieces, bias = walk_.weight(tile) * p_.rows;
    for (int i = threadIdx.x; i < all; i += Tile::kConsumers) {
      const int token = i / pieces, piece = i % pieces, column = first + piece * kPiece;
      if (column >= p_.columns) continue;
      float v[kPiece];
      if (p_.up_strips) {
        const int row = piece / kPieces * 2 * linear::kStripRows + piece % kPieces * kPiece;
        float up[kPiece];
        finished(v, token, row, bias + column);
        finished(up, token, row + linear::kStripRows, bias + p_.columns + column);
#pragma unroll
        for (int j = 0; j < kPiece; j++) v[j] = activated(p_.activation, v[j], up[j]);
      } else {
        finished(v, token, piece * kPiece, bias + column);
      }
      char* to = p_.out + (int64_t{walk_.pair(tile, token)} * p_.columns + column) * 2;
      *reinterpret_cast<uint2*>(to) = make_uint2(sm90::round_pair<T>(v[0], v[1]), sm90::round_pair<T>(v[2], v[3]));
    }
  }

 private:
  // Results a thread ends at a time, and how many times there are so many in a strip's rows.
  static constexpr int kPiece = 4, kPieces = linear::kStripRows / kPiece;

  __device__ void finished(float (&v)[kPiece], int token, int row, int bias) const {
    this->add_up(v, token, row, 1);
    add_bias<T>(p_.bias, v, bias);
  }

  const GroupedMixedMmaParams& p_;
  const GroupedMixedMmaWalk<Tile>& walk_;
};

}  // namespace radix::experts
