// A product of a step: this block's rows of the weight, from the ring, times the tokens.
//
// First the block takes x into shared memory. The eight computing warps share k in units of kUnit elements: of each
// chunk warp w takes units w, w + 8 and so on. Two row groups are the 16 rows of an mma, the tokens its 8 columns; 16
// contiguous bytes of a row are the operands of two mma steps, for x and the weight alike, since a sum may take its
// products in any order. After kPairs pairs the warps' sums are added, in the order of the warps.
//
// Elements of E4M3 become bf16 in registers; a unit, which has one scale in each group, is summed up before it is
// scaled.
//
// A normed input is multiplied by the norm's weight as it is taken; what the norm divides by, which is a factor of the
// token's whole row of results, is applied to the sums. So nobody waits for the sum of squares.
//
// A layer passes through the code once, so that most instructions are not in the nearest cache: loops are short and not
// unrolled where that does not cost more.
#pragma once

#include "gpu/device/element.h"
#include "sm90/common/convert.cuh"
#include "sm90/common/math.cuh"
#include "sm90/common/mma_m16n8k16.cuh"
#include "sm90/persistent_decoder/weights.cuh"

namespace radix::persistent_decoder {

constexpr int kUnit = 64;
constexpr int kUnits = kRowData / 2 / kUnit / kWarps;  // of a chunk of bf16, each warp
static_assert(kUnits == 2 && kUnits * kWarps * kUnit * 2 == kRowData);
constexpr int kCodeUnits = kRowData / kUnit / kWarps;  // of a chunk of E4M3
constexpr int kPairs = 4;                              // whose sums wait for each other
constexpr int kSquares = 32;                           // parts of a token's sum of squares, each of 256 elements
constexpr int kMaxNormed = kSquares * 256;

// What a product multiplies: [tokens, k] of bf16 in words. With a `norm` weight it is normed.
struct Input {
  const uint64_t* x;
  int k;
  uint32_t flag;
  const bf16* norm;
};

// What becomes of the sums of a row of the weight.
enum class Finish {
  store,     // out = sum + bias, where there is one
  residual,  // out += sum, rounded once
  gated,     // out = silu(gate) * up, by the weight of the expert
  floats     // out = sum, a float a word
};
struct Output {
  uint64_t* out;
  int columns;
  uint32_t flag;
  const bf16* bias;
  Finish finish;
  const RoutingMemory* routing;  // where the columns are those of experts of `width`
  int width;
};

struct ProductMemory {
  // A lane (g, t) has row g of both groups of a pair for tokens 2 t and 2 t + 1. Twice: one is read while the other is
  // written.
  float4 sums[2][kPairs][kWarps][32];
  float squares[kMaxTokens][kSquares];
  float scale[kMaxTokens];  // of a normed input
};

__device__ inline void widen(const uint4& packed, float (&x)[8]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = __uint_as_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
}
__device__ inline uint4 rounded(const float (&x)[8]) {
  return {sm90::round_pair<bf16>(x[0], x[1]), sm90::round_pair<bf16>(x[2], x[3]), sm90::round_pair<bf16>(x[4], x[5]),
          sm90::round_pair<bf16>(x[6], x[7])};
}
__device__ inline float low_half(uint32_t pair) {
  return __uint_as_float(pair << 16);
}
__device__ inline float high_half(uint32_t pair) {
  return __uint_as_float(pair & 0xffff0000u);
}

// Bytes between the tokens of x in shared memory: the lanes of two tokens meet in no bank.
__host__ __device__ constexpr int token_step(int k) {
  return k * 2 + 64;
}

// x into shared memory, eight elements a thread at a time.
__device__ inline void take_input(const Input& input, int tokens, char* to, ProductMemory& shared) {
  constexpr int kBatch = 4;
  const int pieces = input.k / 8, all = tokens * pieces;
#pragma unroll 1
  for (int first = threadIdx.x; first < all; first += kBatch * kComputeThreads) {
    Words<4> words[kBatch];
    uint4 norm[kBatch];
    int token[kBatch], at[kBatch];
    const uint64_t* from[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; b++) {
      const int i = first + b * kComputeThreads;
      if (i >= all) continue;
      token[b] = i / pieces;
      at[b] = i - token[b] * pieces;
      from[b] = input.x + int64_t{i} * 4;
      words[b].load(from[b]);
      if (input.norm) norm[b] = __ldg(reinterpret_cast<const uint4*>(input.norm) + at[b]);
    }
#pragma unroll
    for (int b = 0; b < kBatch; b++) {
      if (first + b * kComputeThreads >= all) continue;
      words[b].settle(from[b], input.flag);
      uint4 piece = packed(words[b]);
      if (input.norm) {  // k is a multiple of 256: a warp's pieces are of one token
        float x[8], w[8], squares = 0;
        widen(piece, x);
        widen(norm[b], w);
#pragma unroll
        for (int j = 0; j < 8; j++) {
          squares += x[j] * x[j];
          x[j] *= w[j];
        }
        piece = rounded(x);
        __syncwarp();
#pragma unroll
        for (int mask = 16; mask > 0; mask /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, mask);
        shared.squares[token[b]][at[b] / 32] = squares;
      }
      *reinterpret_cast<uint4*>(to + token[b] * token_step(input.k) + at[b] * 16) = piece;
    }
  }
}

// What the norm divides the results of token `threadIdx.x / 32` by, inverted.
__device__ inline void find_scale(ProductMemory& shared, int k, float eps) {
  const int token = threadIdx.x / 32, lane = threadIdx.x % 32;
  float sum = lane < k / 256 ? shared.squares[token][lane] : 0.f;
#pragma unroll
  for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
  shared.scale[token] = rsqrtf(__fdividef(sum, static_cast<float>(k)) + eps);
}

// Reads the ring in the producer's order.
template <class Form>
class Consumer {
 public:
  __device__ explicit Consumer(const RingMemory& ring)
      : full_(sm90::shared_address(ring.full)),
        empty_(sm90::shared_address(ring.empty)),
        stages_(sm90::shared_address(ring.stages)),
        rows_(stages_ + threadIdx.x % 32 / 4 * kRowBytes + threadIdx.x % 4 * 16),
        bf16_rows_(rows_ + warp() * (kUnit * 2)),
        at_(ring.count) {}

  // The sums of a pair's rows. x: the lane's token, in shared memory.
  __device__ void multiply(float (&sum)[4], const Product<Form>& product, int pair, uint32_t x) {
    if (product.scaled())
      multiply_codes(sum, product, pair, x + warp() * (kUnit * 2) + threadIdx.x % 4 * 32);
    else
      multiply_bf16(sum, product, pair, x + warp() * (kUnit * 2) + threadIdx.x % 4 * 16);
  }

 private:
  __device__ static int warp() { return threadIdx.x / 32; }
  // In a pass of another token this lane's has none of the weights.
  __device__ static bool is_other(const Product<Form>& product, int pass) {
    return product.passes() > 1 && static_cast<int>(threadIdx.x) % 32 / 4 != pass;
  }

  __device__ void multiply_bf16(float (&sum)[4], const Product<Form>& product, int pair, uint32_t x) {
    const bool both = product.groups_of(pair) == 2;
    float other[4] = {};  // two short chains of products instead of a long one
    const int chunks = product.chunks();
#pragma unroll 1
    for (int i = 0, pass = 0, chunk = 0; i < product.passes() * chunks; i++) {
      const int first = product.first_of(chunk), repeated = chunk * product.chunk_size() - first;
      uint4 tokens[kUnits][2], w[2][kUnits][2];
      load(tokens, x + first * 2);
      const bool other_token = is_other(product, pass);
      if (repeated > 0 || other_token) clear_units(tokens, other_token ? kRowData : repeated);
      chunk++;
      if (Form::kMixture && chunk == chunks) {
        chunk = 0;
        pass++;
      }
      read(w[0]);
      if (both) {
        read(w[1]);
      } else {  // gives rows that nobody reads
#pragma unroll
        for (int u = 0; u < kUnits; u++)
#pragma unroll
          for (int h = 0; h < 2; h++) w[1][u][h] = w[0][u][h];
      }
#pragma unroll
      for (int u = 0; u < kUnits; u++) {
        step(sum, w[0][u][0], w[1][u][0], tokens[u][0]);
        step(other, w[0][u][1], w[1][u][1], tokens[u][1]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] += other[i];
  }

  __device__ void multiply_codes(float (&sum)[4], const Product<Form>& product, int pair, uint32_t x) {
    const bool both = product.groups_of(pair) == 2;
    const int chunks = product.chunks();
#pragma unroll 1
    for (int i = 0, pass = 0, chunk = 0; i < product.passes() * chunks; i++) {
      const int first = product.first_of(chunk), repeated = chunk * product.chunk_size() - first;
      const int cleared = is_other(product, pass) ? kRowData : repeated;
      chunk++;
      if (Form::kMixture && chunk == chunks) {
        chunk = 0;
        pass++;
      }
      const int own = wait(), next = both ? wait() : own;  // a second group that is not there gives what nobody reads
      const int stages[2] = {own * kStageBytes, next * kStageBytes};
#pragma unroll 2
      for (int u = 0; u < kCodeUnits; u++) {
        const int unit = warp() + u * kWarps;
        uint4 low = sm90::load_shared_uint4(x + first * 2 + u * (kWarps * kUnit * 2));
        uint4 high = sm90::load_shared_uint4(x + first * 2 + u * (kWarps * kUnit * 2) + 16);
        if (unit * kUnit < cleared) low = high = {};
        add_unit(sum, stages, unit, low, high);
      }
      __syncwarp();
      sm90::barrier_arrive_warp_at(empty_ + own * 8);
      if (both) sm90::barrier_arrive_warp_at(empty_ + next * 8);
    }
  }
  // x: 16 elements, as the lane has codes.
  __device__ void add_unit(float (&sum)[4], const int (&stages)[2], int unit, const uint4& low, const uint4& high) {
    const uint32_t x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    uint32_t codes[2][4];
    float scale[2], part[4] = {};
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const uint4 c = sm90::load_shared_uint4(rows_ + stages[j] + unit * kUnit);
      scale[j] = sm90::load_shared_float(stages_ + stages[j] + kScalesPlace + unit / (kBlock / kUnit) * 4);
      codes[j][0] = c.x;
      codes[j][1] = c.y;
      codes[j][2] = c.z;
      codes[j][3] = c.w;
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {  // even elements, then odd ones
      const uint32_t w[4] = {sm90::widen_odd_e4m3<bf16>(codes[0][i] << 8), sm90::widen_odd_e4m3<bf16>(codes[1][i] << 8),
                             sm90::widen_odd_e4m3<bf16>(codes[0][i]), sm90::widen_odd_e4m3<bf16>(codes[1][i])};
      sm90::mma<bf16>(part, w, __byte_perm(x[2 * i], x[2 * i + 1], 0x5410),
                      __byte_perm(x[2 * i], x[2 * i + 1], 0x7632));
    }
#pragma unroll
    for (int i = 0; i < 4; i++) sum[i] += scale[i / 2] * part[i];
  }
  // The next stage's index, once it is there; the caller frees it.
  __device__ int wait() {
    sm90::barrier_wait_at(full_ + at_.index * 8, at_.parity);
    const int index = at_.index;
    at_.next();
    return index;
  }

  __device__ static void load(uint4 (&to)[kUnits][2], uint32_t row) {
#pragma unroll
    for (int u = 0; u < kUnits; u++)
#pragma unroll
      for (int h = 0; h < 2; h++) to[u][h] = sm90::load_shared_uint4(row + u * (kWarps * kUnit * 2) + h * kUnit);
  }
  // Elements before `count` of a chunk: those that were in the one before it.
  __device__ static void clear_units(uint4 (&tokens)[kUnits][2], int count) {
#pragma unroll
    for (int u = 0; u < kUnits; u++)
      if ((warp() + u * kWarps) * kUnit < count) tokens[u][0] = tokens[u][1] = {};
  }
  // This warp's part of the next stage, which it then frees.
  __device__ void read(uint4 (&w)[kUnits][2]) {
    sm90::barrier_wait_at(full_ + at_.index * 8, at_.parity);
    load(w, bf16_rows_ + at_.index * kStageBytes);
    __syncwarp();
    sm90::barrier_arrive_warp_at(empty_ + at_.index * 8);
    at_.next();
  }
  __device__ static void step(float (&sum)[4], const uint4& first, const uint4& second, const uint4& x) {
    sm90::mma<bf16>(sum, {first.x, second.x, first.y, second.y}, x.x, x.y);
    sm90::mma<bf16>(sum, {first.z, second.z, first.w, second.w}, x.z, x.w);
  }

  const uint32_t full_, empty_, stages_;
  const uint32_t rows_, bf16_rows_;  // what a lane reads of the first stage, of bf16 from its warp's first unit on
  RingPlace at_;
};

// The results of one pair from the sums of all warps, by one warp. column: of the pair's first group.
template <class Form>
__device__ inline void finish_pair(const float4 (&sums)[kWarps][32], const float (&scale)[kMaxTokens], bool scaled,
                                   const Output& output, int column, int groups, int tokens) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float value[2][2] = {};  // of each group and token
#pragma unroll
  for (int w = 0; w < kWarps; w++) {
    const float4 part = sums[w][threadIdx.x % 32];
    value[0][0] += part.x;
    value[0][1] += part.y;
    value[1][0] += part.z;
    value[1][1] += part.w;
  }
  const bool gated = output.finish == Finish::gated;
  const bool floats = Form::kMixture && output.finish == Finish::floats;
  const bool weighed = Form::kMixture && output.routing;
  const int place = weighed ? column / output.width : 0;  // of the expert among the token's
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const int token = 2 * t + j;
    if (scaled) {
      value[0][j] *= scale[token];
      value[1][j] *= scale[token];
    }
    if (gated) value[0][j] = __fdividef(value[0][j], 1.f + __expf(-value[0][j])) * value[1][j];
    if (weighed) value[0][j] *= output.routing->weights[token][place];
#pragma unroll
    for (int i = 0; i < 2; i++) {
      float low = value[i][j], high = __shfl_down_sync(0xffffffffu, low, 4);  // the column beside it
      if (token >= tokens || i >= (gated ? 1 : groups)) continue;
      const int at = column + i * kStageRows + g;
      if (floats) put_float(output.out + token * output.columns + at, low, output.flag);
      if (g % 2 || floats) continue;
      uint64_t* word = output.out + (token * output.columns + at) / 2;
      uint32_t early = 0;
      if (output.finish == Finish::residual) early = __ldcg(reinterpret_cast<const uint32_t*>(word));
      if (output.bias) early = *reinterpret_cast<const uint32_t*>(output.bias + at);
      put_word(word, sm90::round_pair<bf16>(low + low_half(early), high + high_half(early)), output.flag);
    }
  }
}

// turn: which of the sums was written last. x: room for the input.
template <class Form>
__device__ inline void run_product(const Product<Form>& product, const Input& input, const Output& output,
                                   Consumer<Form>& ring, ProductMemory& shared, char* x, int& turn, const Params& p) {
  if (product.empty()) return;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  take_input(input, p.tokens, x, shared);
  compute_sync();
  if (input.norm && warp < p.tokens) find_scale(shared, product.k, p.eps);
  // A column without a token gives results that nobody reads.
  const uint32_t row = sm90::shared_address(x) + min(lane / 4, p.tokens - 1) * token_step(product.k);
#pragma unroll 1
  for (int first = 0; first < product.pairs(); first += kPairs) {
    const int pairs = min(product.pairs() - first, kPairs);
    turn ^= 1;
#pragma unroll 1
    for (int pair = 0; pair < pairs; pair++) {
      float sum[4] = {};
      ring.multiply(sum, product, first + pair, row);
      shared.sums[turn][pair][warp][lane] = {sum[0], sum[1], sum[2], sum[3]};
    }
    compute_sync();
    if (warp < pairs)
      finish_pair<Form>(shared.sums[turn][warp], shared.scale, input.norm != nullptr, output,
                        product.row(first + warp, 0), product.groups_of(first + warp), p.tokens);
  }
}

}  // namespace radix::persistent_decoder
