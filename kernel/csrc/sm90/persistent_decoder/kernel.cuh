// A step of a decoder for up to eight rows in one launch: a block a multiprocessor, all layers in turn.
//
//   block: 8 warps that compute, a warpgroup of which one warp or all four stream weights (weights.cuh). Between the
//   parts of a layer the blocks exchange their results (exchange.cuh):
//
//     norm, q k v  |  norm, rotation, store, attention  |  o + residual  |  norm, gate up, silu  |  down + residual  |
//
//   and where the MLP is a mixture of experts
//
//     o + residual  |  norm, router  |  choice (route.cuh), norm, gate up, silu, weights  |  down + residual  |
//
// Shared memory: sums of a product (product.cuh); what attention's warps join (attend.cuh); the choice of experts; a
// product's input; the ring.
//
// The kernel is compiled apart for each Form of layers (params.cuh): what only a mixture or E4M3 needs is code of those
// kernels alone.
#pragma once

#include "sm90/common/pdl.cuh"
#include "sm90/common/setmaxnreg.cuh"
#include "sm90/persistent_decoder/attend.cuh"
#include "sm90/persistent_decoder/route.cuh"

namespace radix::persistent_decoder {

// Offsets in shared memory, in bytes. The sums of products lie at 0.
struct SharedPlan {
  int attention, routing, input, barriers, ring, stages, bytes;
};

constexpr int kThreads = kComputeThreads + 128;
constexpr int kFeedRegisters = 24, kComputeRegisters = 240;  // of a thread, after setmaxnreg
constexpr int kSharedBytes = 227 << 10;                      // of a block of sm_90
constexpr int kMaxStages = 16;

__host__ __device__ constexpr int aligned(int bytes) {
  return (bytes + 127) / 128 * 128;
}

__host__ __device__ inline int longest_input(const Params& p) {
  const int heads = p.heads * kHeadDim, longer = heads > p.gated_size ? heads : p.gated_size;
  return longer > p.hidden_size ? longer : p.hidden_size;
}

__host__ __device__ inline SharedPlan shared_plan(const Params& p, bool mixture) {
  SharedPlan plan;
  plan.attention = aligned(sizeof(ProductMemory));
  const int out = kWarps * (p.heads / p.kv_heads) * kOutStep * static_cast<int>(sizeof(float));
  plan.routing = plan.attention + aligned(static_cast<int>(sizeof(AttentionMemory)) + out);
  const int keys = p.tokens * p.experts * static_cast<int>(sizeof(uint32_t));
  plan.input = plan.routing + (mixture ? aligned(static_cast<int>(sizeof(RoutingMemory)) + keys) : 0);
  plan.barriers = plan.input + aligned(p.tokens * token_step(longest_input(p)));
  plan.ring = plan.barriers + aligned(2 * kMaxStages * static_cast<int>(sizeof(uint64_t)));
  const int room = (kSharedBytes - plan.ring) / kStageBytes;
  plan.stages = room < kMaxStages ? room : kMaxStages;
  plan.bytes = plan.ring + plan.stages * kStageBytes;
  return plan;
}

// The embeddings become words, by the blocks to whose results the first layer will be added.
template <class Form>
__device__ inline void take_hidden(const Params& p, uint32_t flag) {
  const Product<Form> owner = product_of<Form>(p, p.layers[0], kO);
  const int first = owner.begin * kStageRows, columns = (owner.end - owner.begin) * kStageRows;
  for (int i = threadIdx.x * 2; i < p.tokens * columns; i += kComputeThreads * 2) {
    const int at = i / columns * p.hidden_size + first + i % columns;
    put_word(p.workspace.hidden + at / 2, *reinterpret_cast<const uint32_t*>(p.hidden + at), flag);
  }
}

// hidden = the norm of what the layers have made, a row a block.
__device__ inline void norm_rows(const Params& p, uint32_t flag, float* shared) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  for (int token = blockIdx.x; token < p.tokens; token += gridDim.x) {
    const uint64_t* row = p.workspace.hidden + token * (p.hidden_size / 2);
    float sum = 0;
    for (int i = threadIdx.x * 8; i < p.hidden_size; i += kComputeThreads * 8) {
      Words<4> words;
      words.load(row + i / 2);
      words.settle(row + i / 2, flag);
      float x[8];
      widen(packed(words), x);
#pragma unroll
      for (int j = 0; j < 8; j++) sum += x[j] * x[j];
    }
#pragma unroll
    for (int mask = 16; mask > 0; mask /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
    compute_sync();
    if (lane == 0) shared[warp] = sum;
    compute_sync();
    float all = 0;
    for (int w = 0; w < kWarps; w++) all += shared[w];
    const float scale = 1.f / sqrtf(all / static_cast<float>(p.hidden_size) + p.eps);
    for (int i = threadIdx.x * 8; i < p.hidden_size; i += kComputeThreads * 8) {
      Words<4> words;
      words.load(row + i / 2);
      float x[8], w[8];
      widen(packed(words), x);
      widen(*reinterpret_cast<const uint4*>(p.final_norm + i), w);
#pragma unroll
      for (int j = 0; j < 8; j++) x[j] = x[j] * scale * w[j];
      *reinterpret_cast<uint4*>(p.hidden + int64_t{token} * p.hidden_size + i) = rounded(x);
    }
  }
}

// Flags of a layer: of the hidden states it takes, of q, k and v and the parts, of attention, of what the o product
// makes of the hidden states, of the logits and the gated values. The layer after it takes the next.
constexpr uint32_t kFlagsOfLayer = 5;

// What a product reads and writes. flag: the layer's first.
__device__ inline Input input_of(const Params& p, const Layer& layer, uint32_t flag, int which) {
  switch (which) {
    case kQkv: return {p.workspace.hidden, p.hidden_size, flag, layer.input_norm};
    case kO: return {p.workspace.attended, p.heads * kHeadDim, flag + 2, nullptr};
    case kDown: return {p.workspace.gated, p.gated_size, flag + 4, nullptr};
    default: return {p.workspace.hidden, p.hidden_size, flag + 3, layer.post_norm};
  }
}
template <class Form>
__device__ inline Output output_of(const Params& p, const Layer& layer, uint32_t flag, int which,
                                   const RoutingMemory& routing) {
  switch (which) {
    case kQkv: return {p.workspace.qkv, qkv_rows(p), flag + 1, layer.qkv_bias, Finish::store};
    case kO: return {p.workspace.hidden, p.hidden_size, flag + 3, nullptr, Finish::residual};
    case kGateUp: return {p.workspace.gated, p.gated_size, flag + 4, nullptr, Finish::gated, &routing, p.width};
    default:
      if (Form::kMixture && which == kRouter) return {p.workspace.logits, p.experts, flag + 4, nullptr, Finish::floats};
      return {p.workspace.hidden, p.hidden_size, flag + 5, nullptr, Finish::residual};
  }
}

// Words that this launch does not use, which else might have the age of a flag that comes back. No block reads them.
template <class Form>
__device__ inline void clear_unused(const Params& p) {
  const int first = blockIdx.x * kComputeThreads + threadIdx.x, threads = gridDim.x * kComputeThreads;
  const auto clear = [&](uint64_t* words, int row) {
    for (int i = p.tokens * row + first; i < kMaxTokens * row; i += threads) words[i] = 0;
  };
  const Workspace& w = p.workspace;
  clear(w.hidden, p.hidden_size / 2);
  clear(w.qkv, qkv_rows(p) / 2);
  clear(w.attended, p.heads * kHeadDim / 2);
  if (Form::kMixture) clear(w.logits, p.experts);
  clear(w.gated, p.gated_size / 2);
  for (int i = first; i < kMaxTokens * p.heads * kMaxSplits * kPartWords; i += threads) {
    const int row = i / (p.heads * kMaxSplits * kPartWords), split = i / kPartWords % kMaxSplits;
    if (row >= p.tokens || split >= splits_of(p, p.kv_lens[row])) w.parts[i] = 0;
  }
}

// Takes the flags of a launch from where the one before left off.
class Flags {
 public:
  // What the launch before wrote is visible. Flag 0 is that of a fresh workspace and of cleared words: a launch that
  // would pass it begins again at 1.
  __device__ Flags(uint32_t* control, int layers) : control_(control), before_(control[0]) {
    const uint32_t count = layers * kFlagsOfLayer + 1;
    const bool passes = before_ + count < before_;
    first_ = before_ == 0 || passes ? 1 : before_;
    next_ = first_ + count;
  }

  __device__ uint32_t first() const { return first_; }
  // Whether a quarter of all flags has passed in this launch.
  __device__ bool turned() const { return (before_ ^ next_) >> 30 != 0; }
  // The last of a block. The last block to leave says where the next launch begins.
  __device__ void leave() const {
    compute_sync();
    if (threadIdx.x != 0 || atomicAdd(control_ + 1, 1) != gridDim.x - 1) return;
    control_[0] = next_;
    control_[1] = 0;
  }

 private:
  uint32_t* control_;
  uint32_t before_, first_, next_;
};

// The computing warps' part.
template <class Form>
__device__ inline void compute(const Params& p, const SharedPlan& plan, char* memory, const RingMemory& ring) {
  ProductMemory& products = *reinterpret_cast<ProductMemory*>(memory);
  AttentionMemory& attention_memory = *reinterpret_cast<AttentionMemory*>(memory + plan.attention);
  RoutingMemory& routing = *reinterpret_cast<RoutingMemory*>(memory + plan.routing);
  const Flags flags(p.workspace.control, p.num_layers);
  uint32_t flag = flags.first();
  take_hidden<Form>(p, flag);
  Consumer<Form> consumer(ring);
  int turn = 0;
  Item item;
  if (static_cast<int>(blockIdx.x) < Item::count(p)) item = Item(p, blockIdx.x);
  if (threadIdx.x < kHeadDim) attention_memory.cos_sin[threadIdx.x] = p.cos_sin[item.position * kHeadDim + threadIdx.x];
  compute_sync();
  Attention attention(p, item, attention_memory);
  const Layer* layer = p.layers;
  int which = kQkv;
  do {
    if (which == kQkv) attention.prefetch(*layer);
    if (which == kO && item.exists) attention.run(*layer, flag + 1);
    if (which == kGateUp && has_experts<Form>(p)) route(p, flag + 4, routing);
    run_product(product_of<Form>(p, *layer, which), input_of(p, *layer, flag, which),
                output_of<Form>(p, *layer, flag, which, routing), consumer, products, memory + plan.input, turn, p);
    which = product_after<Form>(which);
    if (which != kQkv) continue;
    layer++;
    flag += kFlagsOfLayer;
  } while (layer != p.layers + p.num_layers);
  norm_rows(p, flag, &products.squares[0][0]);
  if (flags.turned()) clear_unused<Form>(p);
  flags.leave();
}

template <class Form>
__global__ void __launch_bounds__(kThreads, 1) persistent_decode_kernel(const __grid_constant__ Params p) {
  constexpr int kFeeding = kFeedWarps<Form>;
  static_assert(kFeeding * 32 <= kThreads - kComputeThreads && kFeeding * kFeedRows<Form> == kStageRows);
  extern __shared__ __align__(128) char memory[];
  const SharedPlan plan = shared_plan(p, Form::kMixture);
  uint64_t* barriers = reinterpret_cast<uint64_t*>(memory + plan.barriers);
  const RingMemory ring{memory + plan.ring, barriers, barriers + kMaxStages, plan.stages};
  RoutingMemory& routing = *reinterpret_cast<RoutingMemory*>(memory + plan.routing);
  if (threadIdx.x == 0) {
    for (int i = 0; i < plan.stages; i++) {
      sm90::barrier_init(ring.full + i, kFeeding + (Form::kScaled ? kStageScales : 0));
      sm90::barrier_init(ring.empty + i, kWarps * sm90::kWarpArrivals);
    }
    if (Form::kMixture) sm90::barrier_init(&routing.found, kWarps * sm90::kWarpArrivals);
    sm90::barrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x >= kComputeThreads) {
    sm90::setmaxnreg_dec<kFeedRegisters>();
    // Nothing in flight writes weights: not even the kernel before is waited for.
    if (threadIdx.x < kComputeThreads + kFeeding * 32) stream_weights<Form>(p, ring, routing);
    return;
  }
  sm90::setmaxnreg_inc<kComputeRegisters>();
  sm90::pdl_wait();
  sm90::pdl_trigger();
  compute<Form>(p, plan, memory, ring);
}

}  // namespace radix::persistent_decoder
