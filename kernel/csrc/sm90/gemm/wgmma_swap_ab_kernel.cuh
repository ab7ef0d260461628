// out[m, n] = x[m, k] * weight[n, k]^T for up to 64 tokens, of 16-bit operands up to 192, on wgmma. Bound by bytes: the
// weight is read once.
//
// The weight is wgmma's 64-row operand and the tokens its columns, so that few tokens waste no rows.
//
// clang-format off
//   cluster of S blocks   one tile of `rows` weight rows at a time, each block a share of k; persistent where S is 1
//   producer, a warp      TMA of [rows, 128 bytes] of the weight and [m, 128 bytes] of x into a ring of stages,
//                         which runs on from tile to tile; scales of blocks by cp.async
//   consumers             kGroups warpgroups, kBlocks times 64 rows each: wgmma from the stage, sums in registers
//   epilogue              64 rows of each warpgroup and up to 64 tokens at a time through shared memory, so that 8
//                         neighbouring results of a token leave as 16 bytes; with S > 1 the blocks of the cluster first
//                         add up, in the order of their ranks
// clang-format on
//
// `rows` is a multiple of 8 chosen so that the tiles of all blocks are alike; operand rows beyond it, and tokens beyond
// m, hold leftovers (NaNs too) that only reach sums nobody reads: each sum has one row and one token. Where a block
// takes at most half of a multiprocessor, the next kernel's blocks wait beside it with their rings full of weights
// (pdl.cuh). FP8 sums move to float32 registers every 128 elements of k (the tensor cores keep about 14 bits), times
// the scales of the block where there are any; INT8 sums are exact.
//
// Shared memory (kSharedBytes and static barriers); for the only tile of a block `partials` lie over the stages:
//
//   | ring of stages | kStages x kStageBytes          | weight [kRows, 128 bytes], x [kTokens, 128 bytes] |
//   | partials       | kPartialFloats                 | sums on their way to the epilogue                 |
//   | scales         | kStages x (kTokens + 4) floats | of a stage's blocks: tokens, then weight rows     |
//   | full, empty    | kStages each                   | barriers (static)                                 |
//
// SiLU-and-mul: the tensor map interleaves 8 gate rows and 8 up rows, so that a strip of 16 rows is 8 pairs.
#pragma once

#include "sm90/common/cluster.cuh"
#include "sm90/common/cp_async.cuh"
#include "sm90/common/limits.cuh"
#include "sm90/common/pdl.cuh"
#include "sm90/common/tma.cuh"
#include "sm90/common/wgmma.cuh"
#include "sm90/gemm/epilogue.cuh"

namespace radix::gemm {

struct SwapAbParams {
  int m, n, rows, tiles, chunks;  // n: output columns; chunks: of 128 bytes of k
  bool gated, static_weight;
  int up_offset, row_step;  // weight row of column c: c * row_step; of its up row: + up_offset
  const float* block_x;     // scales [m, chunks], or null
  const float* block_w;     // [weight rows / 128, chunks]
  int64_t block_x_step, block_x_unit, block_w_step;
  Epilogue epilogue;

  // Weight row of output column c, and of its up row.
  __device__ int weight_row(int column, int up) const { return gated ? column * row_step + up * up_offset : column; }
  __device__ int first_column(int tile) const { return tile * (gated ? rows / 2 : rows); }
};

// kHalf: two blocks fit a multiprocessor.
template <int kBlocks_, int kGroups_, int kTokens_, bool kBlockScaled_, bool kHalf_>
struct SwapAbTile {
  static constexpr int kBlocks = kBlocks_, kGroups = kGroups_, kTokens = kTokens_;
  static constexpr bool kBlockScaled = kBlockScaled_, kHalf = kHalf_;
  static constexpr int kRows = 64 * kBlocks * kGroups;
  // Enough sums for the vectorized epilogue, where blocks do not share k (vector_epilogue), and registers for it.
  static constexpr bool kVectorEpilogue = kRows > 64 && kTokens > 16 && kTokens <= 64;
  static constexpr int kWeightBytes = kRows * 128, kTokenBytes = kTokens * 128;
  static constexpr int kScales =
      kBlockScaled ? kTokens + 4 : 0;  // of a stage: tokens, then blocks of the weight's rows
  static constexpr int kStageBytes = kWeightBytes + kTokenBytes;
  static constexpr int kColumns = 64 * kGroups, kColumnStep = kColumns + 4;  // of a token in `partials`; 4: banks
  static constexpr int kPass = kTokens < 64 ? kTokens : 64;                  // tokens in `partials` at a time
  static constexpr int kPasses = (kTokens + kPass - 1) / kPass;
  static constexpr int kPartialFloats = kPass * kColumnStep, kAllPartialFloats = kTokens * kColumnStep;
  static constexpr int kFit = ((kHalf ? 111 : 224) * 1024 - kPartialFloats * 4) / (kStageBytes + kScales * 4);
  static constexpr int kStages = kFit < 20 ? kFit : 20;
  static constexpr int kThreads = 128 * kGroups + 32;
  static constexpr int kSharedBytes =
      kStages * (kStageBytes + kScales * 4) + kPartialFloats * 4 + 1024;  // 1024: to align
  static_assert(kRows <= sm90::kMaxBox, "one TMA box of weight rows");
  static_assert(kTokens % 8 == 0 && kTokens >= 8 && kTokens <= sm90::kMaxWgmmaColumns && kTokens <= sm90::kMaxBox,
                "wgmma's N, and a TMA box of tokens");
  static_assert(kBlocks * kTokens / 2 <= 128, "sums of a thread");
  static_assert(kWeightBytes % sm90::kSwizzleAtom == 0 && kTokenBytes % sm90::kSwizzleAtom == 0, "swizzled operands");
  static_assert(kColumnStep % 4 == 0, "partial sums are read as float4");
  static_assert(!kVectorEpilogue || kThreads - 32 >= kColumns / 8, "a thread for each 8 columns of a token");
  static_assert(!kVectorEpilogue || (kThreads - 32) % (kColumns / 8) == 0,
                "a thread's columns are the same for all its tokens");
  static_assert(kThreads * (kHalf ? 2 : 1) <= sm90::kSmThreads && kThreads <= sm90::kMaxThreads);
  static_assert(kStages >= 2, "the ring needs a stage to fill beside the one that is read");
  static_assert(kStages * kStageBytes >= kBlocks * kAllPartialFloats * 4,
                "all sums of the only tile fit into the ring");
  static_assert(sm90::shared_fits(kSharedBytes + 2 * kStages * 8, kHalf ? 2 : 1), "the barriers are static");
};

template <class Tile>
struct SwapAbShared {
  char* stages;            // [kStages][weight, x]
  float* scales;           // [kStages][kScales]
  float* partials;         // [kPass][kColumnStep]
  uint64_t *full, *empty;  // [kStages]
  __device__ char* weight(int stage) const { return stages + stage * Tile::kStageBytes; }
  __device__ char* x(int stage) const { return weight(stage) + Tile::kWeightBytes; }
  __device__ float* scale(int stage) const { return scales + stage * Tile::kScales; }
};

// The chunks of k that this block multiplies.
struct Chunks {
  int first, last;
};

template <int kElementBytes, class Tile>
class SwapAbProducer {
 public:
  __device__ SwapAbProducer(const SwapAbParams& p, const SwapAbShared<Tile>& shared, const sm90::TensorMap* weight_map,
                            const sm90::TensorMap* x_map)
      : p_(p), s_(shared), weight_map_(weight_map), x_map_(x_map), lane_(threadIdx.x % 32) {}

  __device__ void run(Chunks chunks, int first_tile, int step) {
    using namespace sm90;
    // The first stages of the first tile: the weight before the kernel ahead has ended, then what that one wrote.
    const int early = min(Tile::kStages, chunks.last - chunks.first);
    if (!p_.static_weight) pdl_wait();
    for (int i = 0; i < early; i++) load_weight(i, first_tile, chunks.first + i);
    if (p_.static_weight) pdl_wait();
    for (int tile = first_tile; tile < p_.tiles; tile += step) prefetch_epilogue(tile);
    Ring<Tile::kStages> ring;
    for (int i = 0; i < early; i++, ring.next()) load_x(i, first_tile, chunks.first + i);
    for (int tile = first_tile; tile < p_.tiles; tile += step)
      for (int chunk = chunks.first + (tile == first_tile ? early : 0); chunk < chunks.last; chunk++, ring.next()) {
        barrier_wait(&s_.empty[ring.index], ring.parity ^ 1);
        load_weight(ring.index, tile, chunk);
        load_x(ring.index, tile, chunk);
      }
  }

 private:
  static constexpr int kChunk = 128 / kElementBytes;

  // Scales and bias of a tile's rows to L2, long before the epilogue asks for them.
  __device__ void prefetch_epilogue(int tile) const {
    const Epilogue& e = p_.epilogue;
    const int first = p_.first_column(tile), columns = p_.gated ? p_.rows / 2 : p_.rows;
    for (int i = lane_ * 32; i < columns; i += 32 * 32)
      for (int up = 0; up <= (p_.gated ? 1 : 0); up++) {
        const int row = p_.weight_row(min(first + i, p_.n - 1), up);
        if (e.scale_w) sm90::prefetch_l2(e.scale_w + row * e.scale_w_step);
        if (e.bias) sm90::prefetch_l2(e.bias + row * (e.bias_float ? 4 : 2));
      }
  }

  __device__ void load_weight(int stage, int tile, int chunk) const {
    if (lane_ != 0) return;
    uint64_t* barrier = &s_.full[stage];
    sm90::barrier_arrive_expect(barrier, (p_.rows + p_.m) * 128);  // boxes of rows that exist
    const int y = p_.gated ? 0 : tile * p_.rows, z = p_.gated ? 0 : blockIdx.z,
              w = p_.gated ? tile * (p_.rows / 16) : 0;
    sm90::tma_load_4d(s_.weight(stage), weight_map_, barrier, chunk * kChunk, y, z, w, sm90::L2Keep::first_out);
  }

  __device__ void load_x(int stage, int tile, int chunk) const {
    if (lane_ == 0) sm90::tma_load_3d(s_.x(stage), x_map_, &s_.full[stage], chunk * kChunk, 0, blockIdx.z);
    if constexpr (Tile::kBlockScaled) {
      float* to = s_.scale(stage);
      for (int token = lane_; token < p_.m; token += 32)
        sm90::cp_async_4(to + token, p_.block_x + token * p_.block_x_step + chunk * p_.block_x_unit);
      // Up to 3 blocks of rows; gated, 2 of gates and 2 of ups.
      if (lane_ < 4) {
        const int column = p_.first_column(tile), up = p_.gated ? lane_ / 2 : 0;
        const int block = p_.weight_row(column, up) / 128 + (p_.gated ? lane_ % 2 : lane_);
        const int last = p_.weight_row(p_.n - 1, up) / 128;
        sm90::cp_async_4(to + Tile::kTokens + lane_, p_.block_w + min(block, last) * p_.block_w_step + chunk);
      }
      sm90::cp_async_mbarrier_arrive(&s_.full[stage]);
    }
  }

  const SwapAbParams& p_;
  const SwapAbShared<Tile>& s_;
  const sm90::TensorMap *weight_map_, *x_map_;
  const int lane_;
};

template <sm90::Operand kType, class Out, class Tile>
class SwapAbConsumer {
 public:
  static constexpr int kBlocks = Tile::kBlocks, kGroups = Tile::kGroups, kTokens = Tile::kTokens;
  static constexpr int kSums = kTokens / 2;  // of a lane and 64 rows
  static constexpr bool kFp8 = kType == sm90::Operand::e4m3;
  using Sum = sm90::Accumulator<kType>;
  using Params = ParamsOf<kType, SwapAbParams>;

  __device__ SwapAbConsumer(const Params& p, const SwapAbShared<Tile>& shared)
      : p_(p),
        s_(shared),
        group_(threadIdx.x / 128),
        warp_(threadIdx.x % 128 / 32),
        g_(threadIdx.x % 32 / 4),
        t_(threadIdx.x % 4) {}

  __device__ void begin(int tile) {
#pragma unroll
    for (int b = 0; b < kBlocks; b++) {
#pragma unroll
      for (int i = 0; i < kSums; i++) sum_[b][i] = 0;
      if constexpr (Tile::kBlockScaled) {
        // Where the scales of rows g and g + 8 are among the stage's.
        const int strip = (group_ * kBlocks + b) * 4 + warp_, first = p_.first_column(tile);
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int column = first + (p_.gated ? strip * 8 : strip * 16 + half * 8) + g_;
          const int up = p_.gated ? half : 0;
          const int block = p_.weight_row(column, up) / 128 - p_.weight_row(first, up) / 128;
          row_slot_[b][half] = kTokens + 2 * up + min(block, p_.gated ? 1 : 3);
        }
      }
    }
  }

  __device__ void mainloop_step(int stage) {
    using namespace sm90;
    const uint64_t tokens = swizzled_operand(s_.x(stage));
    const auto products = [&](Sum(&target)[kSums], int b, bool add) {
      const uint64_t rows = swizzled_operand(s_.weight(stage) + (group_ * kBlocks + b) * 64 * 128);
#pragma unroll
      for (int i = 0; i < 4; i++) Wgmma<kType, kTokens>::run(target, next_k(rows, i), next_k(tokens, i), add || i > 0);
      wgmma_commit();
    };
    wgmma_fence();
    if constexpr (!kFp8) {
#pragma unroll
      for (int b = 0; b < kBlocks; b++) products(sum_[b], b, true);
      wgmma_wait<0>();
#pragma unroll
      for (int b = 0; b < kBlocks; b++) wgmma_hold(sum_[b]);
    } else {
#pragma unroll
      for (int b = 0; b < kBlocks; b++) {
        float partial[kSums];
        products(partial, b, false);
        wgmma_wait<0>();
        wgmma_hold(partial);
        if constexpr (Tile::kBlockScaled) {
          const float* scale = s_.scale(stage);
          const float rows[2] = {scale[row_slot_[b][0]], scale[row_slot_[b][1]]};
#pragma unroll
          for (int i = 0; i < kTokens / 8; i++) {
            const float2 token = *reinterpret_cast<const float2*>(scale + i * 8 + 2 * t_);
            sum_[b][4 * i] += partial[4 * i] * (token.x * rows[0]);
            sum_[b][4 * i + 1] += partial[4 * i + 1] * (token.y * rows[0]);
            sum_[b][4 * i + 2] += partial[4 * i + 2] * (token.x * rows[1]);
            sum_[b][4 * i + 3] += partial[4 * i + 3] * (token.y * rows[1]);
          }
        } else {
#pragma unroll
          for (int i = 0; i < kSums; i++) sum_[b][i] += partial[i];
        }
        wgmma_fence();
      }
    }
  }

  // A pass's tokens of block b of every warpgroup to partials [token][64 * group + row].
  __device__ void write_partials(int b, int pass, float* partials) const {
#pragma unroll
    for (int i = 0; i < kBlocks; i++)
#pragma unroll
      for (int j = 0; j < Tile::kPasses; j++)
        if (i == b && j == pass) write_partials_of(sum_[i], j, partials);
  }
  // Those of all passes and blocks, one after the other.
  __device__ void write_all_partials(float* partials) const {
#pragma unroll
    for (int b = 0; b < kBlocks; b++)
#pragma unroll
      for (int pass = 0; pass < Tile::kPasses; pass++)
        write_partials_of(sum_[b], pass, partials + b * Tile::kAllPartialFloats + pass * Tile::kPartialFloats);
  }

  // The results of block b's tokens first .. first + count - 1 from the partials of `share` blocks, which begin with
  // token `first`: 8 rows (gated: 8 pairs) of a token at a time, of which this block takes every share-th.
  __device__ void epilogue(int tile, int b, int first, int count, const float* partials, int rank, int share) const {
    if constexpr (Tile::kVectorEpilogue) {
      if (takes_eight(p_.epilogue, p_.gated ? p_.row_step : 1, p_.n))
        return p_.gated ? vector_epilogue<true>(tile, b, partials) : vector_epilogue<false>(tile, b, partials);
    } else if constexpr (Tile::kPasses > 1) {
      const Pieces pieces = {tile, first, count, rank, share, partials};
      if (takes_eight(p_.epilogue, p_.gated ? p_.row_step : 1, p_.n))
        return p_.gated ? many_epilogue<true>(pieces) : many_epilogue<false>(pieces);
    }
    constexpr int kThreads = 128 * kGroups;
    const int pieces = Tile::kColumns / (p_.gated ? 16 : 8), total = count * pieces;
    for (int i = threadIdx.x * share + rank; i < total; i += kThreads * share) {
      const int token = i / pieces, at = i % pieces * (p_.gated ? 16 : 8);  // of the partials
      const int row = (at / 64 * kBlocks + b) * 64 + at % 64;               // of the tile
      const int column = p_.first_column(tile) + (p_.gated ? row / 2 : row);
      const int existing = row < p_.rows ? min(8, p_.n - column) : 0;
      if (existing <= 0) continue;
      finish_piece(partials + token * Tile::kColumnStep + at, first + token, column, existing, share);
    }
  }

 private:
  __device__ void write_partials_of(const Sum (&sum)[kSums], int pass, float* partials) const {
    constexpr int kEights = Tile::kPass / 8;
    float* to = partials + 2 * t_ * Tile::kColumnStep + group_ * 64 + warp_ * 16 + g_;
#pragma unroll
    for (int i = 0; i < kEights; i++) {
      const int from = pass * kEights + i;
      if (from >= kTokens / 8) continue;
#pragma unroll
      for (int j = 0; j < 4; j++) to[(i * 8 + j % 2) * Tile::kColumnStep + j / 2 * 8] = word_of(sum[4 * from + j]);
    }
  }

  // 8 results, of which `count` exist, from their sums.
  __device__ void finish_piece(const float* from, int token, int column, int count, int share) const {
    float v[8];
    sum_eight<true>(v, from, share, token, column, count);
    finish_eight<Out>(p_.epilogue, v, token, p_.weight_row(column, 0), p_.gated ? p_.row_step : 1, count);
    if (p_.gated) {
      float up[8];
      sum_eight<false>(up, from + 8, share, token, column, count);
      finish_eight<Out>(p_.epilogue, up, token, p_.weight_row(column, 1), p_.row_step, count);
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = silu(v[j]) * up[j];
    }
    store_eight<Out>(p_.epilogue, v, int64_t{blockIdx.z} * p_.m + token, column, count);
  }

  // What epilogue() is asked for.
  struct Pieces {
    int tile, first, count, rank, share;
    const float* partials;
  };
  // Many tokens where all is in whole pieces of 16 bytes: the residuals of several are on their way while their sums
  // are read, from the neighbour's memory too.
  template <bool kGated>
  __device__ void many_epilogue(const Pieces& q) const {
    static_assert(kBlocks == 1, "a warpgroup's rows of the tile are those of the partials");
    static_assert(sm90::operand_bytes(kType) == 2, "sums have no scales");
    constexpr int kWidth = kGated ? 16 : 8, kPieces = Tile::kColumns / kWidth, kTogether = kGated ? 1 : 2;
    const Epilogue& e = p_.epilogue;
    const int at = threadIdx.x % kPieces * kWidth, step = 128 * kGroups / kPieces * q.share;
    const int column = p_.first_column(q.tile) + (kGated ? at / 2 : at);
    const int64_t row = int64_t{blockIdx.z} * p_.m + q.first;  // of the result
    if (at >= p_.rows || column >= p_.n) return;
    for (int i = threadIdx.x / kPieces * q.share + q.rank; i < q.count; i += kTogether * step) {
      uint4 more[kTogether] = {};
      float v[kTogether][8];
#pragma unroll
      for (int j = 0; j < kTogether; j++)
        if (e.residual && i + j * step < q.count) more[j] = residual_eight(e, row + i + j * step, column);
#pragma unroll
      for (int j = 0; j < kTogether; j++) {
        const int token = min(i + j * step, q.count - 1);
        const float* from = q.partials + token * Tile::kColumnStep + at;
        split_k_reduce(v[j], from, q.share);
        add_bias_eight<Out>(e, v[j], p_.weight_row(column, 0), kGated ? p_.row_step : 1, 8);
        if constexpr (kGated) {
          float up[8];
          split_k_reduce(up, from + 8, q.share);
          add_bias_eight<Out>(e, up, p_.weight_row(column, 1), p_.row_step, 8);
#pragma unroll
          for (int l = 0; l < 8; l++) v[j][l] = silu(v[j][l]) * up[l];
        }
        if (e.residual) add_eight<Out>(v[j], &more[j]);
      }
#pragma unroll
      for (int j = 0; j < kTogether; j++)
        if (i + j * step < q.count) store_sums<Out>(e, v[j], row + i + j * step, column);
    }
  }

  // finish() where all is in whole pieces of 16 bytes and nobody shares k. A thread's columns are the same for all of
  // its tokens, whose scales and sums are on their way together.
  template <bool kGated>
  __device__ void vector_epilogue(int tile, int b, const float* partials) const {
    constexpr int kWidth = kGated ? 16 : 8, kPieces = Tile::kColumns / kWidth, kStep = 128 * kGroups / kPieces;
    constexpr int kRounds = (kTokens + kStep - 1) / kStep;
    const Epilogue& e = p_.epilogue;
    const int at = threadIdx.x % kPieces * kWidth, row = (at / 64 * kBlocks + b) * 64 + at % 64;
    const int column = p_.first_column(tile) + (kGated ? row / 2 : row), first = threadIdx.x / kPieces;
    if (row >= p_.rows || column >= p_.n) return;
    const EightRows<Out> rows(e, p_.weight_row(column, 0), kGated ? p_.row_step : 1);
    const EightRows<Out> ups(e, p_.weight_row(column, kGated), p_.row_step);
    float v[kRounds][8], scale[kRounds];
#pragma unroll
    for (int i = 0; i < kRounds; i++)
      scale[i] = e.scale_x && first + i * kStep < p_.m ? token_scale(e, first + i * kStep) : 0.f;
#pragma unroll
    for (int i = 0; i < kRounds; i++) {
      const float* from =
          partials + (kTokens < kStep ? min(first, kTokens - 1) : first + i * kStep) * Tile::kColumnStep + at;
      sum_eight<!kGated>(v[i], from, 1, min(first + i * kStep, p_.m - 1), column, 8);
      rows.finish(v[i], scale[i]);
      if constexpr (kGated) {
        float up[8];
        sum_eight<false>(up, from + 8, 1, 0, column, 8);
        ups.finish(up, scale[i]);
#pragma unroll
        for (int j = 0; j < 8; j++) v[i][j] = silu(v[i][j]) * up[j];
      }
    }
#pragma unroll
    for (int i = 0; i < kRounds; i++) {
      const int token = first + i * kStep;
      if (token < p_.m) store_whole<Out>(e, v[i], int64_t{blockIdx.z} * p_.m + token, column);
    }
  }

  // The sums of a token and 8 columns from `column` on, of which `count` exist, as float32. kShifted: x may have zero
  // points.
  template <bool kShifted>
  __device__ void sum_eight(float (&v)[8], const float* from, int share, int token, int column, int count) const {
    if constexpr (kType == sm90::Operand::s8) {
      Sum sums[8];
      split_k_reduce(sums, from, share);
      if (kShifted && p_.zeros.x) {
        const int32_t zero = zero_point(p_.zeros, token);
#pragma unroll
        for (int j = 0; j < 8; j++) sums[j] -= zero * p_.zeros.weight_sums[column + min(j, count - 1)];
      }
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = static_cast<float>(sums[j]);
    } else {
      split_k_reduce(v, from, share);
    }
  }

  __device__ static void split_k_reduce(Sum (&v)[8], const float* from, int share) {
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = 0;
    for (int other = 0; other < share; other++) {
#pragma unroll
      for (int h = 0; h < 2; h++) {
        const float4 partial = share == 1 ? *reinterpret_cast<const float4*>(from + 4 * h)
                                          : sm90::load_remote(sm90::remote_address(from + 4 * h, other));
        v[4 * h] += sum_of<Sum>(partial.x), v[4 * h + 1] += sum_of<Sum>(partial.y);
        v[4 * h + 2] += sum_of<Sum>(partial.z), v[4 * h + 3] += sum_of<Sum>(partial.w);
      }
    }
  }

  const Params& p_;
  const SwapAbShared<Tile>& s_;
  const int group_, warp_, g_, t_;
  Sum sum_[kBlocks][kSums];
  int row_slot_[kBlocks][2];
};

template <sm90::Operand kType, class Out, class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kHalf ? 2 : 1)
    wgmma_swap_ab_kernel(const __grid_constant__ sm90::TensorMap weight_map,
                         const __grid_constant__ sm90::TensorMap x_map,
                         const __grid_constant__ ParamsOf<kType, SwapAbParams> p) {
  using namespace sm90;
  constexpr int kStages = Tile::kStages, kConsumers = 128 * Tile::kGroups;
  extern __shared__ char unaligned[];
  __shared__ uint64_t full[kStages], empty[kStages];
  SwapAbShared<Tile> shared;
  shared.stages = unaligned + (-shared_address(unaligned) & 1023);
  shared.partials = reinterpret_cast<float*>(shared.stages + kStages * Tile::kStageBytes);
  shared.scales = shared.partials + Tile::kPartialFloats;
  shared.full = full;
  shared.empty = empty;

  pdl_trigger();
  if (threadIdx.x == kConsumers) {
    prefetch_tensor_map(&weight_map);
    prefetch_tensor_map(&x_map);
    for (int i = 0; i < kStages; i++) {
      barrier_init(&full[i], Tile::kBlockScaled ? 33 : 1);  // the producer's thread; its lanes' scales
      barrier_init(&empty[i], kWarpArrivals * kConsumers / 32);
    }
    barrier_init_fence();
  }
  __syncthreads();

  const int share = gridDim.x, rank = blockIdx.x, step = gridDim.y;  // x: the blocks of a cluster
  const Chunks chunks = {p.chunks * rank / share, p.chunks * (rank + 1) / share};
  if (threadIdx.x >= kConsumers) {
    SwapAbProducer<operand_bytes(kType), Tile>(p, shared, &weight_map, &x_map).run(chunks, blockIdx.y, step);
    if (share > 1) {
      __syncwarp();
      cluster_sync();
      cluster_sync_relaxed();
    }
    return;
  }

  SwapAbConsumer<kType, Out, Tile> self(p, shared);
  Ring<kStages> ring;
  const bool once = share > 1 || (Tile::kVectorEpilogue && p.tiles <= step);
  for (int tile = blockIdx.y; tile < p.tiles; tile += step) {
    self.begin(tile);
    for (int chunk = chunks.first; chunk < chunks.last; chunk++, ring.next()) {
      barrier_wait(&full[ring.index], ring.parity);
      self.mainloop_step(ring.index);
      barrier_arrive_warp(&empty[ring.index]);
    }
    pdl_wait();
    float* partials = shared.partials;
    if (once) {
      // The only tile: its copies have arrived and been used, so that the stages are free to hold all sums.
      named_barrier(1, kConsumers);
      partials = reinterpret_cast<float*>(shared.stages);
      self.write_all_partials(partials);
      share > 1 ? cluster_sync() : named_barrier(1, kConsumers);
    }
    const int passes = once ? 1 : Tile::kPasses;
#pragma unroll 1
    for (int i = 0; i < Tile::kBlocks * passes; i++) {
      const int b = i / passes, first = i % passes * Tile::kPass;
      const int count = Tile::kPasses == 1 || once ? p.m : min(Tile::kPass, p.m - first);
      if (count <= 0) continue;
      if (!once) {
        self.write_partials(b, i % passes, partials);
        named_barrier(1, kConsumers);
      }
      self.epilogue(tile, b, first, count, partials + (once ? b * Tile::kAllPartialFloats : 0), rank, share);
      if (!once) named_barrier(1, kConsumers);
    }
    if (share > 1) cluster_sync_relaxed();  // a block's shared memory stays until the others have read it
  }
}

}  // namespace radix::gemm
