// Products of many rows a group or an expert on the persistent kernel (gemm/wgmma_persistent_grouped.cuh), in FP8 with
// block scales.
#pragma once

#include "sm90/experts/problem.cuh"
#include "sm90/gemm/wgmma_persistent_grouped.cuh"

namespace radix::experts {

// result[i] = weight[g] @ x[i] for the rows i that `tiles` lists, of group g each.
struct PersistentProduct {
  const char* op;
  rk_device device;
  rk_stream stream;
  const char *x, *weight;  // [rows, k], [groups, n, k]
  int64_t x_step;          // bytes
  int64_t rows;
  int groups, n, k;
  bool gated;    // silu(gate) * up: weight rows are n / 2 gate rows, then n / 2 up rows, multiples of 128
  int expected;  // tiles of rows, about
  gemm::TileRowsList tiles;
  const float *x_scale, *w_scale;  // of row i and chunk c: x_scale[i * step + c * unit]; [groups, n / 128, k / 128]
  int64_t x_scale_step, x_scale_unit;
  char* out;
  int64_t out_step;  // elements
};

void grouped_persistent_fp8(const PersistentProduct& q);

// A list of tiles in a workspace: how many, then each (gemm::TileRows). A launch makes it.
struct TileList {
  char* data;

  static int64_t bytes(int64_t rows, int groups) {
    return kHead + (rows / gemm::kPersistentTokens + groups) * int64_t{sizeof(gemm::TileRows)};
  }
  __host__ __device__ int* count() const { return reinterpret_cast<int*>(data); }
  __host__ __device__ gemm::TileRows* tiles() const { return reinterpret_cast<gemm::TileRows*>(data + kHead); }
  gemm::TileRowsList groups() const { return {tiles(), count()}; }

 private:
  static constexpr int64_t kHead = 256;
};

// Of rows whose group indices[row] names, each group from a multiple of 128 on.
void list_contiguous(const Problem& q, const int32_t* indices, int64_t rows, int groups, TileList to);
// Of groups of `room` rows each, of which the first counts[group] exist.
void list_masked(const Problem& q, const int32_t* counts, int room, int groups, TileList to);
// Of sorted pairs: expert e's are places offsets[e] .. offsets[e + 1] - 1. And places[pair], the inverse of `sorted`.
void list_pairs(const Problem& q, const Scratch& s);

// The whole of fused_experts for many pairs in FP8, bf16 outside.
void grouped_persistent_experts(const Problem& q, const Scratch& s);

}  // namespace radix::experts
