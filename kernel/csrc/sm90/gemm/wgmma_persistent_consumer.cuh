// A consumer warpgroup of the persistent kernel: 64 tokens, or twice 64, x kColumns weight rows.
//
// While it promotes sums to float32 registers or waits for anything, the tensor cores have only the other warpgroup to
// work for. So that this is short, the address of the next stage, and whether it is full, are known before the products
// of this one have ended, and descriptors are numbers in uniform registers (`uniform`). With kPingPong the warpgroups
// start their products one after the other: where they come together, at a stage that both waited for, they would stay
// together.
#pragma once

#include "sm90/common/cluster.cuh"
#include "sm90/common/convert.cuh"
#include "sm90/common/ldmatrix.cuh"
#include "sm90/common/tma.cuh"
#include "sm90/common/wgmma.cuh"
#include "sm90/gemm/wgmma_persistent_tile.cuh"

namespace radix::gemm {

template <sm90::Operand kType, class Out, class Tile, Sums kSums, Share kShare, Weights kWeights = Weights::dense>
class PersistentConsumer {
 public:
  static constexpr int kColumns = Tile::kColumns, kHalves = Tile::kHalves;
  static constexpr bool kBlockScaled = kSums == Sums::blocks, kScaled = sm90::operand_bytes(kType) == 1;
  static constexpr bool kGrouped = kWeights != Weights::dense, kPaired = kWeights == Weights::grouped_gated;
  // Whether the warpgroups are in ping-pong; then a tile begins before all of the last one has been stored.
  static constexpr bool kPingPong = kSums != Sums::fast && (kHalves == 2 || (kBlockScaled && kColumns == 192));
  static constexpr bool kColumnScaled = !kBlockScaled && !kGrouped;  // or with bias: what `columns` holds
  static constexpr bool kInteger = kType == sm90::Operand::s8;
  using Sum = sm90::Accumulator<kType>;
  using Params = ParamsOf<kType, PersistentParams>;
  static_assert(kSums == Sums::fast || !kInteger, "sums of INT8 operands are exact where they are");
  static_assert(kSums == Sums::fast || kScaled || kHalves == 1, "16-bit products need no promotion in halves");
  static_assert(kSums == Sums::fast || (kHalves + 1) * kColumns / 2 <= 192, "sums, and what the tensor cores add to");
  static_assert(kSums != Sums::fast || kHalves == 1, "the tensor cores add to one half's sums alone");
  static_assert(!kBlockScaled || kScaled, "scales of blocks are of FP8 operands");
  static_assert(!kBlockScaled || within_two_scale_blocks(kPaired ? kColumns / 2 : kColumns));
  static_assert(!kGrouped || kShare == Share::tokens, "groups of any size: a cluster's blocks have the same tokens");
  static_assert(kShare != Share::k || kHalves == 1, "split k: the neighbours exchange_split_k halves of one tile");
  static_assert(kShare != Share::k || kColumns % 16 == 0, "an exchange_split_k moves a quarter of the sums as float4");
  static_assert(!kPaired || Tile::kRound % (2 * kStoreBoxColumns) == 0, "half of the columns leave in whole boxes");

  __device__ PersistentConsumer(const Params& p, const PersistentShared<Tile>& shared)
      : p_(p), group_(__shfl_sync(~0u, threadIdx.x / 128, 0) - 1), shared_(shared) {
    using sm90::shared_address;
    tokens_ = uniform(sm90::operand_low(shared.tokens(0) + group_ * 64 * 128));
    weight_ = uniform(sm90::operand_low(shared.weight(0)));
    full_ = uniform(shared_address(shared.full));
    scales_ = shared_address(shared.scales) + (group_ * 64 + row()) * 4;
    empty_ = kShare == Share::k ? shared_address(shared.empty)
                                : sm90::remote_address(shared.empty, lane() % kPersistentCluster);
    ready_ = sm90::barrier_test_at(full_, 0);
    if (kPingPong && group_ == 1) ping_pong_arrive();
  }

  // Starts on a stage, where it begins a tile before that tile's coordinates are needed. Ping-pong: where there is no
  // tile, the products are of what the stage holds, and nobody reads them; under way on one path alone they would be
  // waited for.
  __device__ void start(bool more = true) {
    if (more) wait_full();
    products<0>(false);
  }

  // The sums of a tile over `chunks` stages, of which start() has begun the first in ping-pong; then the
  // last products are still under way.
  __device__ void mainloop(const TileCoord& at, int chunks) {
    if constexpr (kSums == Sums::fast) start();
    begin(at);
    if constexpr (kSums == Sums::fast) {
      for (int chunk = 1; chunk < chunks; chunk++) {
        wait_full();
        products<0>(true);
        sm90::wgmma_wait<1>();
        release();
      }
      complete();
    } else if constexpr (kPingPong) {
      for (int chunk = 1; chunk < chunks; chunk++) {
        promote_first_halves(std::make_integer_sequence<int, kHalves - 1>());
        complete();
        start();
      }
      promote_first_halves(std::make_integer_sequence<int, kHalves - 1>());
    } else {
      for (int chunk = 0; chunk < chunks; chunk++) {
        start();
        complete();
      }
    }
  }
  // The products under way: to the sums.
  __device__ void complete() {
    sm90::wgmma_wait<0>();
    release();
    if constexpr (kSums == Sums::fast) {
      sm90::wgmma_hold(sum_[0]);
    } else {
      promote(sum_[kHalves - 1]);
    }
  }

  // Whether this warpgroup has no tokens of a tile; then it passes its stages.
  __device__ bool idle(const TileCoord& at) const { return at.row + group_ * 64 >= at.end; }
  __device__ void skip_stages(int chunks) {
    for (int chunk = 0; chunk < chunks; chunk++) {
      if (!ready_) sm90::barrier_wait_at(full_ + ring_.index * 8, ring_.parity);
      ring_.next();
      ready_ = sm90::barrier_test_at(full_ + ring_.index * 8, ring_.parity);
      release();
      if constexpr (kPingPong) ping_pong_wait(), ping_pong_arrive();
    }
  }

  // Sums of the block that has the other half of k: of half of the columns, which this one then keeps. All threads of
  // the cluster synchronize here.
  __device__ void exchange_split_k(int rank) {
    using namespace sm90;
    constexpr int kKept = kColumns / 4;
    // Where the room for results is too small: the stages behind what epilogue() writes, once both warpgroups have read
    // them.
    constexpr bool kFits = 2 * Tile::kBuffers * Tile::kOutBytes >= 256 * kKept * 4;
    static_assert(kFits || 256 * kKept * 4 + 2 * Tile::kOutBytes <= Tile::kStages * Tile::kStageBytes,
                  "the sums of both warpgroups fit behind the results in the stages");
    if constexpr (!kFits) named_barrier(3, 256);
    char* place = kFits ? shared_.results : shared_.stages + 2 * Tile::kOutBytes;
    float4* to = reinterpret_cast<float4*>(place) + threadIdx.x - 128;
#pragma unroll
    for (int i = 0; i < kKept; i += 4) {
      float v[4];
#pragma unroll
      for (int j = 0; j < 4; j++) v[j] = word_of(rank ? sum_[0][i + j] : sum_[0][kKept + i + j]);
      to[i / 4 * 256] = make_float4(v[0], v[1], v[2], v[3]);
    }
    cluster_sync();
#pragma unroll
    for (int i = 0; i < kKept; i += 4) {
      const float4 other = load_remote(remote_address(to + i / 4 * 256, rank ^ 1));
      const float v[4] = {other.x, other.y, other.z, other.w};
#pragma unroll
      for (int j = 0; j < 4; j++) sum_[0][i + j] = (rank ? sum_[0][kKept + i + j] : sum_[0][i + j]) + sum_of<Sum>(v[j]);
    }
  }

  // The last products' sums, and the first of two halves to the result.
  __device__ void begin_epilogue(const sm90::TensorMap& map, const TileCoord& at) {
    if constexpr (kHalves == 2) store_half<0>(map, at, 0);
    if constexpr (kPingPong) complete();
  }
  // The last half of a tile, columns kept .. of it, to the result, a round at a time.
  __device__ void epilogue(const sm90::TensorMap& map, const TileCoord& at, int kept) {
    store_half<kHalves - 1>(map, at, kept);
  }
  __device__ void finish() const {
    if constexpr (kPingPong) sm90::wgmma_wait<0>();
    if (leader()) sm90::tma_store_wait();
  }

 private:
  __device__ int lane() const { return threadIdx.x % 32; }
  __device__ bool leader() const { return threadIdx.x % 128 == 0; }
  // First of this lane's two rows (the other is 8 below).
  __device__ int row() const { return threadIdx.x % 128 / 32 * 16 + lane() / 4; }
  __device__ int token(const TileCoord& at, int half) const { return first(at, half) + row(); }
  // Of the 64 tokens that this warpgroup has of a half of the tile.
  __device__ int first(const TileCoord& at, int half) const { return at.row + half * kPersistentTokens + group_ * 64; }

  // One number for the warp that the compiler neither takes apart nor computes again.
  __device__ static uint32_t uniform(uint32_t v) {
    asm volatile("" : "+r"(v));
    return __shfl_sync(~0u, v, 0);
  }

  __device__ void begin(const TileCoord& at) {
    if constexpr (kSums != Sums::fast) {
#pragma unroll
      for (int half = 0; half < kHalves; half++)
#pragma unroll
        for (int i = 0; i < kColumns / 2; i++) sum_[half][i] = 0;
    }
    if constexpr (kBlockScaled) {
      split_ = kPaired ? 2 * (128 - at.n_tile * (kColumns / 2) % 128) : 128 - at.n_tile * kColumns % 128;
    } else if constexpr (kColumnScaled) {
#pragma unroll
      for (int i = 0; i < kHalves * 2; i++)
        token_scale_[i / 2][i % 2] =
            kScaled ? token_scale(p_.epilogue, min(token(at, i / 2) + i % 2 * 8, at.end - 1)) : 1.f;
    }
    if constexpr (kInteger) {
#pragma unroll
      for (int i = 0; i < 2; i++) token_zero_[i] = zero_point(p_.zeros, min(token(at, 0) + i * 8, at.end - 1));
    }
  }

  // The tensor cores do one warpgroup's products after the other's, not both at half the speed: else both would end,
  // and be added, at the same time.
  __device__ void ping_pong_wait() const { sm90::named_barrier(4 + group_, 256); }
  __device__ void ping_pong_arrive() const { sm90::named_arrive(5 - group_, 256); }

  // Where products go.
  __device__ auto& target() {
    if constexpr (kSums == Sums::fast) {
      return sum_[0];
    } else {
      return accumulator_;
    }
  }

  __device__ void wait_full() {
    if (!ready_) sm90::barrier_wait_at(full_ + ring_.index * 8, ring_.parity);
  }
  // All halves of a stage but the last, each of which is followed by the products of the next.
  template <int... kHalf>
  __device__ void promote_first_halves(std::integer_sequence<int, kHalf...>) {
    (promote_first_half<kHalf>(), ...);
  }
  template <int kHalf>
  __device__ void promote_first_half() {
    sm90::wgmma_wait<0>();
    promote(sum_[kHalf]);
    products<kHalf + 1>(false);
  }

  // Starts on a half of a stage; `more`: on top of the stage before. The last half goes on to the next stage.
  template <int kHalf>
  __device__ void products(bool more) {
    using namespace sm90;
    const uint32_t step = ring_.index * (Tile::kStageBytes >> 4),
                   tokens = tokens_ + step + kHalf * (kPersistentTokens * 128 >> 4);
    if constexpr (kPingPong) ping_pong_wait();
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; i++)
      Wgmma<kType, kColumns>::run(target(), operand_at(tokens + 2 * i), operand_at(weight_ + step + 2 * i),
                                  i > 0 || more);
    wgmma_commit();
    if constexpr (kPingPong) ping_pong_arrive();
    if constexpr (kBlockScaled) load_scales<kHalf>();
    if constexpr (kHalf + 1 < kHalves) return;
    ring_.next();
    ready_ = barrier_test_at(full_ + ring_.index * 8, ring_.parity);
  }
  // The scales of a stage's blocks: of this lane's two tokens, and of the rows before and after a border of 128; gated
  // of gate rows, then of up rows.
  template <int kHalf>
  __device__ void load_scales() {
    const uint32_t at = scales_ + ring_.index * (Tile::kScales * 4), rows = at - (group_ * 64 + row()) * 4;
    x_[0] = sm90::load_shared_float(at + kHalf * (kPersistentTokens * 4));
    x_[1] = sm90::load_shared_float(at + kHalf * (kPersistentTokens * 4) + 32);
    if constexpr (kHalf == 0) {
#pragma unroll
      for (int i = 0; i < kBorders; i++) w_[i] = sm90::load_shared_float(rows + (Tile::kTokens + i) * 4);
    }
  }
  // The oldest stage that this warp has not given back, to all that fill it.
  __device__ void release() {
    const uint32_t at = empty_ + release_ring_.index * 8;
    if constexpr (kShare == Share::k) {
      sm90::barrier_arrive_warp_at(at);
    } else if constexpr (sm90::kWarpArrivals > 1) {
      sm90::barrier_arrive_warp(shared_.empty + release_ring_.index, kPersistentCluster);
    } else {
      if (lane() < kPersistentCluster) sm90::barrier_arrive_remote_at(at);
    }
    release_ring_.next();
  }

  // What the tensor cores have added up, which is complete, to a half's sums.
  __device__ void promote(float (&sum)[kColumns / 2]) {
    // Borders of 128 rows lie at multiples of this within a tile.
    constexpr int kSegment = kColumns % 128 == 0 ? 128 : kColumns % 64 == 0 ? 64 : 32;
    sm90::wgmma_hold(accumulator_);
    float scale[kBorders] = {};  // of both tokens; gated for gate, then for up
#pragma unroll
    for (int i = 0; i < kColumns / 2; i++) {
      if constexpr (kBlockScaled) {
        const int column = i / 4 * 8;
        if (i % 4 == 0 && column % kSegment == 0) {
#pragma unroll
          for (int j = 0; j < kBorders; j++) {
            const float w = 128 % kColumns == 0 || column < split_ ? w_[j / 2 * 2] : w_[j / 2 * 2 + 1];
            scale[j] = x_[j % 2] * w;
          }
        }
        sum[i] += accumulator_[i] * scale[(kPaired ? i / 4 % 2 * 2 : 0) + i % 4 / 2];
      } else {
        sum[i] += accumulator_[i];
      }
    }
  }

  template <int kHalf>
  __device__ void store_half(const sm90::TensorMap& map, const TileCoord& at, int kept) {
    constexpr int kEach = kRounds / kHalves;
    if (kPaired || (!kBlockScaled && p_.gated)) {
      store_rounds<true, kHalf * kEach>(map, at, kept, std::make_integer_sequence<int, kEach>());
    } else {
      store_rounds<false, kHalf * kEach>(map, at, kept, std::make_integer_sequence<int, kEach>());
    }
  }
  template <bool kGated, int kFirst, int... r>
  __device__ void store_rounds(const sm90::TensorMap& map, const TileCoord& at, int kept,
                               std::integer_sequence<int, r...>) {
    (store_round<kGated, kFirst + r>(map, at, kept), ...);
  }
  template <bool kGated, int r>
  __device__ void store_round(const sm90::TensorMap& map, const TileCoord& at, int kept) {
    using namespace sm90;
    constexpr int kHalf = r / (kRounds / kHalves), kFrom = r % (kRounds / kHalves) * Tile::kRound,
                  kColumnsNow = kShare == Share::k ? kColumns / 2 : Tile::kRound;
    constexpr int kGates = kGated ? 2 : 1;
    // Blocks that split k exchange sums where others put their results; the stages are free by then.
    char* result = kShare == Share::k ? shared_.stages + group_ * Tile::kOutBytes
                                      : shared_.results + (group_ * Tile::kBuffers + store_buffer_) * Tile::kOutBytes;
    store_buffer_ = store_buffer_ + 1 == Tile::kBuffers ? 0 : store_buffer_ + 1;
    if (leader()) tma_store_wait_read<Tile::kBuffers - 1>();
    named_barrier(1 + group_, 128);
    write<kGated, kHalf, kFrom, kColumnsNow>(at, kept, result);
    fence_async_shared();
    named_barrier(1 + group_, 128);
    const int x = (at.n_tile * kColumns + kept + kFrom) / kGates, y = first(at, kHalf);
    const bool whole = !kGrouped || y + 64 <= at.end;
    if (!whole) copy<kColumnsNow / kGates>(result, x, p_.n / kGates, y, at.end - y);
    if (!leader()) return;
    if (whole && y < at.end)
      for (int box = 0; box < kColumnsNow / kGates; box += kStoreBoxColumns)
        tma_store_3d(&map, result + box * 64 * 2, x + box, y, at.batch);
    tma_store_commit();  // a group for every round, for the wait counts them
  }

  // The first `rows` of 64 staged rows, kCount of `all` columns from x on, where the rows behind may not be written.
  template <int kCount>
  __device__ void copy(const char* shared, int x, int all, int y, int rows) const {
    constexpr int kPieces = kCount / 8;  // of 16 bytes
    const Epilogue& e = p_.epilogue;
    for (int i = threadIdx.x % 128; i < rows * kPieces; i += 128) {
      const int row = i / kPieces, piece = i % kPieces, column = x + piece * 8;
      if (column >= all) continue;
      const char* from = shared + piece / 4 * 64 * 64 + row * 64 + (piece % 4 ^ row / 2 % 4) * 16;
      *reinterpret_cast<uint4*>(e.out + ((y + row) * e.out_step + column) * 2) = *reinterpret_cast<const uint4*>(from);
    }
  }

  // kCount columns of the sums from kFrom on to `shared` [columns / 32][64 rows][64 bytes], swizzled. What lies outside
  // of the matrix is not stored.
  template <bool kGated, int kHalf, int kFrom, int kCount>
  __device__ void write(const TileCoord& at, int kept, char* shared) const {
    uint32_t residual[kCount / 8 / (kGated ? 2 : 1)][2];
    if constexpr (!kScaled && !kGrouped)
      load_residual(token(at, kHalf), at, (at.n_tile * kColumns + kept + kFrom) / (kGated ? 2 : 1), residual);
    // Lane 16 i + r gives the address of row r of the warp's 16, of the first or second of two pieces.
    const int staged_row = threadIdx.x % 128 / 32 * 16 + lane() % 16, swizzle = staged_row / 2 % 4;
    const uint32_t to = sm90::shared_address(shared) + staged_row * 64;
    uint32_t words[2][2];
    // Scale and bias of columns 8 i + 2 t, + 1.
    float4 columns[kCount / 8];
    if constexpr (kColumnScaled) {
      const float2* from = shared_.columns() + kept + kFrom + threadIdx.x % 4 * 2;
#pragma unroll
      for (int i = 0; i < kCount / 8; i++) columns[i] = *reinterpret_cast<const float4*>(from + i * 8);
    }
    int2 weight_sums[kCount / 8];
    if constexpr (kInteger) load_weight_sums(at.n_tile * kColumns + kept + kFrom + threadIdx.x % 4 * 2, weight_sums);
#pragma unroll
    for (int i = 0; i < kCount / 8; i += kGated ? 2 : 1) {
      const int piece = i / (kGated ? 2 : 1);
      float v[4];
      finish_four<kHalf>(v, kFrom / 8 + i, columns[i], weight_sums[i]);
      if constexpr (kGated) {
        float up[4];
        finish_four<kHalf>(up, kFrom / 8 + i + 1, columns[i + 1], weight_sums[i + 1]);
#pragma unroll
        for (int j = 0; j < 4; j++) v[j] = silu(v[j]) * up[j];
      }
      if constexpr (!kScaled && !kGrouped) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const float2 more = unpack_pair<Out>(residual[piece][half]);
          v[2 * half] += more.x;
          v[2 * half + 1] += more.y;
        }
      }
      words[piece % 2][0] = round_pair<Out>(v[0], v[1]);
      words[piece % 2][1] = round_pair<Out>(v[2], v[3]);
      if (piece % 2 == 1)
        sm90::stmatrix_x4(to + piece / 4 * (64 * 64) + ((piece % 4 - 1 + lane() / 16) ^ swizzle) * 16, words[0][0],
                          words[0][1], words[1][0], words[1][1]);
    }
  }

  // The residual at this lane's columns of both tokens, 8 of the result apart from `column` on; zeros without one.
  template <int kPieces>
  __device__ void load_residual(int first, const TileCoord& at, int column, uint32_t (&to)[kPieces][2]) const {
    const Epilogue& e = p_.epilogue;
    const int columns = p_.gated ? p_.n / 2 : p_.n;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int token = first + half * 8;
      const char* from = e.residual + (token * e.residual_step + column + threadIdx.x % 4 * 2) * 2;
#pragma unroll
      for (int i = 0; i < kPieces; i++) {
        const bool there = e.residual && token < at.end && column + i * 8 < columns;
        to[i][half] = there ? *reinterpret_cast<const uint32_t*>(from + i * 16) : 0;
      }
    }
  }

  // The sums of the weight's codes of columns `column`, + 1 and those further on, 8 apart; zeros where x has no zero
  // points.
  template <int kPieces>
  __device__ void load_weight_sums(int column, int2 (&to)[kPieces]) const {
    const int32_t* from = p_.zeros.weight_sums + column;
#pragma unroll
    for (int i = 0; i < kPieces; i++) {
      const bool there = p_.zeros.x && column + i * 8 < p_.n;
      to[i] = there ? make_int2(from[i * 8], from[i * 8 + 1]) : make_int2(0, 0);
    }
  }

  // The four sums of columns 8 i + 2 t, + 1 of both tokens, times their scales, with bias.
  template <int kHalf>
  __device__ void finish_four(float (&v)[4], int i, const float4& c, const int2& weight_sums) const {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      if constexpr (kInteger) {
        const int32_t extra = token_zero_[j / 2] * (j % 2 ? weight_sums.y : weight_sums.x);
        v[j] = static_cast<float>(sum_[kHalf][4 * i + j] - extra);
      } else {
        v[j] = sum_[kHalf][4 * i + j];
      }
    }
    if constexpr (kColumnScaled) {
      v[0] = v[0] * (token_scale_[kHalf][0] * c.x) + c.y;
      v[1] = v[1] * (token_scale_[kHalf][0] * c.z) + c.w;
      v[2] = v[2] * (token_scale_[kHalf][1] * c.x) + c.y;
      v[3] = v[3] * (token_scale_[kHalf][1] * c.z) + c.w;
    }
  }

  const Params& p_;
  const int group_;
  const PersistentShared<Tile> shared_;
  static constexpr int kRounds = kShare == Share::k ? 1 : kHalves * Tile::kRounds;
  Sum sum_[kHalves][kColumns / 2], accumulator_[kSums == Sums::fast ? 1 : kColumns / 2];
  static constexpr int kBorders = kPaired ? 4 : 2;
  float x_[2], w_[kBorders], token_scale_[kHalves][2];
  int32_t token_zero_[2];
  int split_, store_buffer_ = 0;
  sm90::Ring<Tile::kStages> ring_, release_ring_;  // the stage to read, the stage to release
  uint32_t tokens_, weight_;                       // low words of the first stage's descriptors
  uint32_t full_, empty_, scales_;                 // addresses in shared memory
  bool ready_;                                     // the stage to read is full for certain
};

}  // namespace radix::gemm
