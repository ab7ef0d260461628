// What follows the products of a packed weight on wgmma: sums of those that share k are added, then bias, gate,
// residual, and stores of 16 bytes.
#pragma once

#include "sm90/gemm/epilogue.cuh"
#include "sm90/linear/mixed_wgmma_mainloop.cuh"

namespace radix::linear {

struct MixedWgmmaParams {
  MixedWeights weight;
  gemm::Epilogue epilogue;
  int m, columns;                  // columns of the result
  int tiles, token_tiles, tokens;  // tiles of the clusters; along the tokens; tokens of a tile
  int row_bits, share_bits;        // powers of two: a cluster's neighbours along the rows, and its shares of k
  int chunks;                      // of all of k

  RK_HOST_DEVICE int row_blocks() const { return 1 << row_bits; }
  RK_HOST_DEVICE int k_shares() const { return 1 << share_bits; }
  RK_HOST_DEVICE int blocks() const { return 1 << (row_bits + share_bits); }  // of a cluster
};

// What a block of a cluster does. Each role asks anew: what it would keep from before costs registers.
struct MixedBlock {
  int neighbour, share;  // its rank is share * row_blocks + neighbour
  int first_tile, tile_step;
  MixedChunks chunks;

  __device__ explicit MixedBlock(const MixedWgmmaParams& p) {
    const int rank = sm90::cluster_rank(), bits = p.row_bits + p.share_bits;
    neighbour = rank & (p.row_blocks() - 1);
    share = rank >> p.row_bits;
    first_tile = blockIdx.x >> bits;
    tile_step = gridDim.x >> bits;
    chunks.first = p.chunks * share >> p.share_bits;
    chunks.count = (p.chunks * (share + 1) >> p.share_bits) - chunks.first;
  }
};

// Sums of kTokens tokens at a time: a thread has 8 neighbouring results of a token.
template <int kStrips, int kKParts>
struct MixedSums {
  static constexpr int kTokens = 64, kRows = kStrips * kTileRows;
  static constexpr int kStep = kRows + 4;  // floats from a token to the next: no bank twice
  static constexpr int kPartFloats = kTokens * kStep, kBytes = kKParts * kPartFloats * 4;
  static_assert(kStep % 4 == 0, "sums are read as float4");
};

// All consumers of a block; those of the blocks that share a tile's k wait for each other, and each block finishes
// every k_shares-th token. Two barriers: the sums are there; they have been read (what was read has been stored, so no
// read is on its way).
template <class Tile>
class MixedWgmmaEpilogue {
 public:
  using T = typename Tile::T;
  using Sums = typename Tile::Sums;

  __device__ MixedWgmmaEpilogue(const MixedWgmmaParams& p, char* sums, uint64_t* there, uint64_t* read,
                                const MixedBlock& block)
      : p_(p),
        sums_(reinterpret_cast<float*>(sums)),
        there_(there),
        read_(read),
        first_rank_(block.neighbour),
        share_(block.share),
        gate_(p.epilogue.gate) {}

  __device__ static void init(const MixedWgmmaParams& p, uint64_t* there, uint64_t* read) {
    const int arrivals = Tile::kConsumerWarps * sm90::kWarpArrivals * p.k_shares();
    sm90::barrier_init(there, arrivals);
    sm90::barrier_init(read, arrivals);
  }

  template <int kColumns>
  __device__ void store(const MixedPlace& at, const float (&sum)[kColumns / 2]) {
#pragma unroll
    for (int first = 0; first < kColumns; first += Sums::kTokens) {
      const int count = min(Sums::kTokens, at.x_count - first);
      if (count <= 0) break;
      sm90::barrier_wait_published(read_, parity_ ^ 1);
#pragma unroll
      for (int c = 0; c < Sums::kTokens / 8; c++) stage(c * 8, sum + first / 2 + c * 4);
      publish(there_);
      sm90::barrier_wait_published(there_, parity_);
      finish(at, first, count);
      publish(read_);
      parity_ ^= 1;
    }
  }

  // Until the blocks that share k have read this one's last sums.
  __device__ void drain() const { sm90::barrier_wait_published(read_, parity_ ^ 1); }

 private:
  __device__ void publish(const uint64_t* barrier) const {
    sm90::barrier_publish_warp(barrier, p_.k_shares(), first_rank_, p_.row_blocks());
  }

  // 8 tokens from the accumulators' layout.
  __device__ void stage(int token, const float* d) const {
    const int lane = threadIdx.x % 32, group = threadIdx.x / 128 - 1;
    const int row = group % Tile::kStrips * kTileRows + threadIdx.x % 128 / 32 * 16 + lane / 4;
    float* to = sums_ + group / Tile::kStrips * Sums::kPartFloats + (token + lane % 4 * 2) * Sums::kStep + row;
    to[0] = d[0];
    to[Sums::kStep] = d[1];
    to[8] = d[2];
    to[Sums::kStep + 8] = d[3];
  }

  // Adds the eight sums at `place` of a part, of all parts of all shares in this order.
  __device__ void sum_eight(float (&v)[8], int place) const {
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = 0;
    for (int share = 0; share < p_.k_shares(); share++) {
      const uint32_t from = sm90::remote_address(sums_ + place, first_rank_ + (share << p_.row_bits));
#pragma unroll
      for (int part = 0; part < Tile::kKParts; part++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
          const int at = part * Sums::kPartFloats + h * 4;
          const float4 four =
              share == share_ ? *reinterpret_cast<const float4*>(sums_ + place + at) : sm90::load_remote(from + at * 4);
          v[4 * h] += four.x;
          v[4 * h + 1] += four.y;
          v[4 * h + 2] += four.z;
          v[4 * h + 3] += four.w;
        }
    }
  }

  __device__ void finish(const MixedPlace& at, int first, int count) const {
    const bool gated = gate_ != gemm::Gate::none;
    const int pieces = gated ? Sums::kRows / 16 : Sums::kRows / 8;
    const int first_column = gate_ == gemm::Gate::interleaved ? at.row / 2 : at.row;
    for (int i = threadIdx.x - 128;; i += Tile::kConsumers) {
      const int token = (i / pieces << p_.share_bits) + share_, piece = i % pieces, column = first_column + piece * 8;
      if (token >= count) return;
      if (column < p_.columns) finish_piece(token * Sums::kStep, piece, at.x_row + first + token, column);
    }
  }

  __device__ void finish_piece(int staged, int piece, int token, int column) const {
    const gemm::Epilogue& e = p_.epilogue;
    const int count = min(8, p_.columns - column);
    float v[8];
    if (gate_ == gemm::Gate::none) {
      sum_eight(v, staged + piece * 8);
      gemm::finish_eight<T>(e, v, token, column, 1, count);
    } else {
      const bool halves = gate_ == gemm::Gate::halves;
      float up[8];
      sum_eight(v, staged + piece * (halves ? 8 : 16));
      sum_eight(up, staged + (halves ? piece * 8 + Sums::kRows / 2 : piece * 16 + 8));
      if (!halves) apart(v, up);
      const int step = halves ? 1 : 2;
      gemm::finish_eight<T>(e, v, token, column * step, step, count);
      gemm::finish_eight<T>(e, up, token, column * step + (halves ? p_.columns : 1), step, count);
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = gemm::silu(v[j]) * up[j];
    }
    gemm::store_eight<T>(e, v, token, column, count);
  }

  // 16 sums of gates and ups in turn: first the gates, then the ups.
  __device__ static void apart(float (&v)[8], float (&up)[8]) {
    float gates[8], ups[8];
#pragma unroll
    for (int j = 0; j < 8; j++) {
      gates[j] = j < 4 ? v[2 * j] : up[2 * j - 8];
      ups[j] = j < 4 ? v[2 * j + 1] : up[2 * j - 7];
    }
#pragma unroll
    for (int j = 0; j < 8; j++) {
      v[j] = gates[j];
      up[j] = ups[j];
    }
  }

  const MixedWgmmaParams& p_;
  float* sums_;  // [kKParts][tokens][kStep]
  uint64_t *there_, *read_;
  const int first_rank_, share_;  // ranks of the blocks that share k: first_rank_ + share * row_blocks
  const gemm::Gate gate_;
  uint32_t parity_ = 0;
};

}  // namespace radix::linear
