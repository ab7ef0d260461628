// The weights of a step, streamed through shared memory by one warp or a few that run ahead of the others: they wait
// for room in the ring alone, never for the grid. So the memory stays busy while blocks wait for each other.
//
//   stage: kStageRows rows of a weight, a chunk of k of kRowData bytes each, one bulk copy a row. A row begins 64 bytes
//   further than a multiple of 128, so that the eight lanes that read 16 bytes of two rows at a time meet in no bank.
//   Behind the rows: the scales of E4M3's, one for each kBlock elements of k.
//
// Producer and consumers walk the same order: products of a layer, pairs of row groups, passes, chunks of k, groups of
// a pair. Where the last chunk is a short one, it begins earlier: what it repeats is multiplied by zeros.
//
// A mixture's gate_up and down are products with the experts that a token has chosen, one behind the other: along the
// rows of gate_up, and along k of down, so that down adds them up. Each token has a pass with the rows of its own
// experts. The warps that stream wait for their numbers once a layer; meanwhile they have the next layer's first
// weights brought into L2.
#pragma once

#include "sm90/common/cp_async.cuh"
#include "sm90/common/mbarrier.cuh"
#include "sm90/common/tma.cuh"
#include "sm90/persistent_decoder/exchange.cuh"
#include "sm90/persistent_decoder/params.cuh"

namespace radix::persistent_decoder {

constexpr int kStageRows = 8;
constexpr int kRowData = 2048;  // bytes
constexpr int kRowBytes = kRowData + 64;
constexpr int kStageScales = kRowData / kBlock;
constexpr int kScalesPlace = kStageRows * kRowBytes;
constexpr int kStageBytes = kScalesPlace + kStageScales * static_cast<int>(sizeof(float));
constexpr int kMinStages = 4;

// The warps that stream, each some rows of a stage: a stage of one weight is a copy of each lane of one warp, but the
// pieces of experts' rows are more.
template <class Form>
constexpr int kFeedWarps = Form::kMixture ? 4 : 1;
template <class Form>
constexpr int kFeedRows = kStageRows / kFeedWarps<Form>;

__host__ __device__ constexpr int ceil_div(int a, int b) {
  return (a + b - 1) / b;
}

// What is multiplied: one weight, or those of the experts of each token, which lie behind each other so.
enum class Along { one, rows, k };

// out[token, row] = x[token, :] * weight[row, :], of which this block makes the rows of its groups. Paired: group i
// stands for group i of the gate and the same of up, `pair_rows` further.
template <class Form>
struct Product {
  const char* weight;
  const float* scales;
  int k, pair_rows;
  Along way;
  int tokens, width;  // of the step; of an expert
  int begin, end;     // groups of this block

  __device__ Product(const Params& p, const Weight& w, int rows, int k_, bool paired, Along along)
      : weight(static_cast<const char*>(w.data)),
        scales(w.scales),
        k(k_),
        pair_rows(paired ? rows / 2 : 0),
        way(along),
        tokens(p.tokens),
        width(p.width) {
    const unsigned groups = static_cast<unsigned>(paired ? rows / 2 : rows) / kStageRows;
    begin = static_cast<int>(groups * blockIdx.x / gridDim.x);  // host: the product fits 32 bits
    end = static_cast<int>(groups * (blockIdx.x + 1) / gridDim.x);
  }
  __device__ bool empty() const { return begin == end; }
  __device__ bool paired() const { return pair_rows > 0; }
  // Pairs of groups: two neighbours, or a gate's and its up's.
  __device__ int pairs() const { return paired() ? end - begin : ceil_div(end - begin, 2); }
  __device__ int groups_of(int pair) const { return paired() ? 2 : min(end - begin - 2 * pair, 2); }
  // The first row of group i of a pair.
  __device__ int row(int pair, int i) const {
    return paired() ? (begin + pair) * kStageRows + i * pair_rows : (begin + 2 * pair + i) * kStageRows;
  }
  __device__ bool scaled() const { return Form::kScaled && (!Form::kMixture || scales != nullptr); }
  __device__ Along along() const { return Form::kMixture ? way : Along::one; }
  // Tokens that have weights of their own.
  __device__ int passes() const { return along() == Along::one ? 1 : tokens; }
  __device__ int element_bytes() const { return scaled() ? 1 : 2; }
  __device__ int chunk_size() const { return scaled() ? kRowData : kRowData / 2; }
  __device__ int chunks() const { return ceil_div(k, chunk_size()); }
  __device__ int first_of(int chunk) const { return min(chunk * chunk_size(), k - chunk_size()); }

  // The same in the weights that a token multiplies by. experts: its own.
  __device__ int row_of(const int* experts, int pair, int i) const {
    const int own = row(pair, i);
    if (along() != Along::rows) return own;
    const int gate = row(pair, 0), place = gate / width;
    return (experts[place] * 2 + i) * width + gate - place * width;
  }
};

// Of a layer, in turn; a mixture's router comes before gate_up.
enum ProductKind { kQkv, kO, kGateUp, kDown, kRouter };

template <class Form>
__device__ inline int product_after(int which) {
  if (Form::kMixture && which == kO) return kRouter;
  if (Form::kMixture && which == kRouter) return kGateUp;
  return which == kDown ? kQkv : which + 1;
}

template <class Form>
__device__ inline Product<Form> product_of(const Params& p, const Layer& layer, int which) {
  switch (which) {
    case kQkv: return {p, layer.qkv, qkv_rows(p), p.hidden_size, false, Along::one};
    case kO: return {p, layer.o, p.hidden_size, p.heads * kHeadDim, false, Along::one};
    case kGateUp: return {p, layer.gate_up, 2 * p.gated_size, p.hidden_size, true, Along::rows};
    default:
      if (Form::kMixture && which == kRouter) return {p, layer.router, p.experts, p.hidden_size, false, Along::one};
      return {p, layer.down, p.hidden_size, p.gated_size, false, Along::k};
  }
}

// The experts of the tokens at the layer at hand, the best first, as each block that multiplies with them finds out.
struct RoutingMemory {
  uint64_t found;  // a barrier: a phase a layer
  int experts[kMaxTokens][kMaxTopK];
  float weights[kMaxTokens][kMaxTopK];
  alignas(16) uint32_t keys[1];  // [tokens][experts]: the logits in an order of integers
};

// Whether this block has a part in what the experts do, and so in no layer or in all.
template <class Form>
__device__ inline bool has_experts(const Params& p) {
  const Layer& layer = p.layers[0];
  return Form::kMixture && !(product_of<Form>(p, layer, kGateUp).empty() && product_of<Form>(p, layer, kDown).empty());
}

// Where the next stage lies, in turn.
struct RingPlace {
  int stages, index = 0;
  uint32_t parity = 0;

  __device__ explicit RingPlace(int count) : stages(count) {}
  __device__ void next() {
    if (++index == stages) {
      index = 0;
      parity ^= 1;
    }
  }
};

struct RingMemory {
  char* stages;
  uint64_t *full, *empty;  // a barrier of each stage
  int count;
};

__device__ inline void bulk_copy(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
          "r"(sm90::shared_address(shared)),
      "l"(global), "r"(bytes), "r"(sm90::shared_address(barrier)), "l"(static_cast<uint64_t>(sm90::L2Keep::first_out))
      : "memory");
}

// What the layer ahead reads beside its weights: small, and else a miss on everybody's way. By one warp.
__device__ inline void prefetch_vectors(const Params& p, const Layer& layer) {
  const auto fetch = [](const void* from, int bytes) {
    if (!from) return;
#pragma unroll 1
    for (int i = threadIdx.x % 32 * 128; i < bytes; i += 32 * 128)
      sm90::prefetch_l2(static_cast<const char*>(from) + i);
  };
  fetch(layer.input_norm, p.hidden_size * 2);
  fetch(layer.post_norm, p.hidden_size * 2);
  fetch(layer.qkv_bias, qkv_rows(p) * 2);
  fetch(layer.q_norm, kHeadDim * 4);
  fetch(layer.k_norm, kHeadDim * 4);
}

// The block's rows of a product that comes later, into L2.
template <class Form>
__device__ inline void prefetch_rows(const Product<Form>& product) {
  const int row_bytes = product.k * product.element_bytes();
  const char* from = product.weight + int64_t{product.begin} * kStageRows * row_bytes;
  const int bytes = (product.end - product.begin) * kStageRows * row_bytes;
#pragma unroll 1
  for (int i = (threadIdx.x - kComputeThreads) * kRowData; i < bytes; i += kFeedWarps<Form> * 32 * kRowData)
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + i), "r"(min(bytes - i, kRowData))
                 : "memory");
}

// The whole step of a feeding warp.
template <class Form>
__device__ inline void stream_weights(const Params& p, const RingMemory& ring, RoutingMemory& routing) {
  constexpr int kRows = kFeedRows<Form>;
  const bool is_first = kFeedWarps<Form> == 1 || threadIdx.x / 32 == kWarps;
  const int lane = threadIdx.x % 32;
  const int stage_row = kFeedWarps<Form> == 1 ? lane : (threadIdx.x / 32 - kWarps) * kRows + lane;
  RingPlace at(ring.count);
  const auto open = [&] {
    sm90::barrier_wait(ring.empty + at.index, at.parity ^ 1);
    if (lane == 0) sm90::barrier_arrive_expect(ring.full + at.index, kRowData * kRows);
    __syncwarp();
  };
  // Of rows from `row` on, which are `length` bytes long, `count` bytes from `first` on, a row a lane, to byte `to` of
  // the stage's.
  const auto copy = [&](const Product<Form>& product, int row, int length, int first, int to, int count) {
    if (lane < kRows)
      bulk_copy(ring.stages + at.index * kStageBytes + stage_row * kRowBytes + to,
                product.weight + (int64_t{row} + stage_row) * length + first, count, ring.full + at.index);
  };
  // What an expert has of a chunk of down is a piece of its own. first: an element.
  const auto copy_along_k = [&](const Product<Form>& product, const int* experts, int row, int first) {
    const int length = product.width * product.element_bytes();
    int place = first / product.width, local = (first - place * product.width) * product.element_bytes();
#pragma unroll 1
    for (int done = 0; done < kRowData; place++) {
      const int count = min(length - local, kRowData - done);
      copy(product, experts[place] * p.hidden_size + row, length, local, done, count);
      done += count;
      local = 0;
    }
  };
  // A scale a lane.
  const auto copy_scales = [&](const Product<Form>& product, const int* experts, int row, int first) {
    if (!is_first || lane >= kStageScales) return;
    if (product.scaled()) {
      int at_k = first + lane * kBlock, length = product.k;
      if (product.along() == Along::k) {
        length = product.width;
        const int place = at_k / length;
        at_k -= place * length;
        row += experts[place] * p.hidden_size;
      }
      float* to = reinterpret_cast<float*>(ring.stages + at.index * kStageBytes + kScalesPlace) + lane;
      sm90::cp_async_4(to, product.scales + row / kBlock * (length / kBlock) + at_k / kBlock);
    }
    sm90::cp_async_mbarrier_arrive(ring.full + at.index);
  };
  const bool waits = has_experts<Form>(p);
#pragma unroll 1
  for (int l = 0; l < p.num_layers; l++) {
    const Layer& layer = p.layers[l];
    const bool is_last = l + 1 == p.num_layers;
    if (is_first && blockIdx.x == l % gridDim.x && !is_last) prefetch_vectors(p, p.layers[l + 1]);
    int which = kQkv;
    do {
      const Product<Form> product = product_of<Form>(p, layer, which);
      if (waits && which == kGateUp) {
        if (!is_last) prefetch_rows(product_of<Form>(p, p.layers[l + 1], kQkv));
        sm90::barrier_wait(&routing.found, l % 2);
      }
#pragma unroll 1
      for (int pair = 0; pair < product.pairs(); pair++)
#pragma unroll 1
        for (int pass = 0; pass < product.passes(); pass++)
#pragma unroll 1
          for (int chunk = 0; chunk < product.chunks(); chunk++)
#pragma unroll 1
            for (int i = 0; i < product.groups_of(pair); i++) {
              const int* experts = routing.experts[pass];
              const int row = product.row_of(experts, pair, i), first = product.first_of(chunk);
              open();
              if (product.along() == Along::k)
                copy_along_k(product, experts, row, first);
              else
                copy(product, row, product.k * product.element_bytes(), first * product.element_bytes(), 0, kRowData);
              if (Form::kScaled) copy_scales(product, experts, row, first);
              at.next();
            }
      which = product_after<Form>(which);
    } while (which != kQkv);
  }
}

}  // namespace radix::persistent_decoder
