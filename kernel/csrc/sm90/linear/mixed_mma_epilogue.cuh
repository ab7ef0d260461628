// The end of a mixed_mma tile: the sums of the warps that share k meet in shared memory and become results.
#pragma once

#include "sm90/linear/mixed_mma_tile.cuh"

namespace radix::linear {

template <class Tile>
class MixedPartials {
 public:
  __device__ explicit MixedPartials(float* partials) : partials_(partials) {}

  // The sums of a lane: of strip `slot` of the tile and 8 tokens from `token` on, as mma.sync leaves them.
  __device__ void store(const float (&sum)[4], int k_warp, int slot, int token) const {
    const int lane = threadIdx.x % 32;
    float* to =
        partials_ + set_ + (k_warp * Tile::kTokens + token + lane % 4 * 2) * Tile::kColumnStep + slot * 16 + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; i++) to[i % 2 * Tile::kColumnStep + i / 2 * 8] = sum[i];
  }

  // The other one of two sets of sums, one behind the other: while some warps still end a tile, others leave their sums
  // of the next one.
  __device__ void change() { set_ = Tile::kPartialBytes / 4 - set_; }

 protected:
  // The sums of rows of the tile, `step` apart, in the order of the warps.
  template <int kRows>
  __device__ void add_up(float (&v)[kRows], int token, int row, int step) const {
    const float* from = partials_ + set_ + token * Tile::kColumnStep + row;
#pragma unroll
    for (int j = 0; j < kRows; j++) v[j] = from[j * step];
#pragma unroll
    for (int q = 1; q < Tile::kKWarps; q++)
#pragma unroll
      for (int j = 0; j < kRows; j++) v[j] += from[q * Tile::kTokens * Tile::kColumnStep + j * step];
  }

 private:
  float* const partials_;
  int set_ = 0;  // floats from the first
};

template <class T, class Tile>
class MixedEpilogue : public MixedPartials<Tile> {
 public:
  __device__ MixedEpilogue(const MixedParams& p, float* partials) : MixedPartials<Tile>(partials), p_(p) {}

  // All results of the tile, 8 of a token at a time, by all consumers.
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

 private:
  using MixedPartials<Tile>::add_up;

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
};

}  // namespace radix::linear
