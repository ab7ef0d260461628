// Routing on the GPU. A row of logits lives in the registers of 1 to 32 lanes, each with a run of consecutive experts.
//
// A round of top-k is a maximum over order-preserving 32-bit keys (shuffles), then a ballot: among the lanes that hold
// the maximum the lowest has the lowest expert id. The winner takes its key out and the next round begins.
#include "api/moe.h"

#include <climits>

#include "gpu/device/element.h"
#include "gpu/device/launch.h"
#include "gpu/device/reduce.h"
#include "gpu/device/rows.h"
#include "gpu/moe/align.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kRouteThreads = 128, kSumThreads = 256;
constexpr int kMaxTopk = 32;
constexpr uint32_t kTaken = 0, kNanKey = 1;  // below the key of every number
constexpr float kLeastSum = 1e-20f;

// Larger numbers have larger keys, -0 that of +0, NaN the lowest.
__device__ inline uint32_t key_of(float x) {
  if (x != x) return kNanKey;
  const uint32_t bits = __float_as_uint(x + 0.f);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ inline float number_of(uint32_t key) {
  if (key == kNanKey) return __uint_as_float(0x7fc00000u);
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

struct MaxKey {
  __device__ uint32_t operator()(uint32_t a, uint32_t b) const { return a > b ? a : b; }
};

// Over the kLanes lanes that share a row; every one gets the result, in one fixed order.
template <int kLanes, class T, class Op>
__device__ inline T row_reduce(T value, Op op) {
#pragma unroll
  for (int mask = kLanes / 2; mask > 0; mask >>= 1) value = op(value, shuffle_xor(value, mask));
  return value;
}

// The lanes of this row where `yes` holds, the row's first lane in bit 0.
template <int kLanes>
__device__ inline uint32_t row_ballot(bool yes) {
  if constexpr (kLanes == 1) return yes;
  const uint64_t all = ballot(yes) >> (threadIdx.x % RK_WARP / kLanes * kLanes);
  return static_cast<uint32_t>(all) & (kLanes == 32 ? 0xffffffffu : (1u << kLanes) - 1);
}

template <int kLanes, class T>
__device__ inline T from_lane(T value, int lane) {
  if constexpr (kLanes == 1) return value;
  const int source = threadIdx.x % RK_WARP / kLanes * kLanes + lane;
#if defined(__HIP__)
  return __shfl(value, source, RK_WARP);
#else
  return __shfl_sync(0xffffffffu, value, source, RK_WARP);
#endif
}

__device__ inline float sigmoid(float x) {
  return 1.f / (1.f + exponential(-x));
}

struct RouteTask {
  const char* logits;
  int64_t rows, stride;  // stride in bytes
  int experts, topk;
  bool packed;  // 16-byte loads
  bool renormalize;
  float* weights;
  int32_t* ids;
  const float* bias;  // sigmoid only, may be NULL
  int groups, kept;   // groups of 1: all stay
  float scale;
  int shared;  // columns behind topk: experts that every token goes to
};

template <int kValues, class T>
__device__ void load_row(const RouteTask& task, int64_t row, int first, float (&x)[kValues]) {
  constexpr int N = kPackSize<T>;
  const T* logits = reinterpret_cast<const T*>(task.logits + row * task.stride);
  if (task.packed) {  // experts are a multiple of N too
    Pack<T, N> packs[kValues / N];
#pragma unroll
    for (int p = 0; p < kValues / N; p++)
      if (first + p * N < task.experts) packs[p] = load_pack<N>(logits + first + p * N);
#pragma unroll
    for (int i = 0; i < kValues; i++) x[i] = first + i < task.experts ? to_float(packs[i / N].at[i % N]) : 0.f;
  } else {
#pragma unroll
    for (int i = 0; i < kValues; i++) x[i] = first + i < task.experts ? to_float(logits[first + i]) : 0.f;
  }
}

// Takes out the keys of all groups but the best ones: a group's score is its largest number, of sigmoids the sum of its
// two largest.
template <bool kSigmoid, int kLanes, int kValues>
__device__ void keep_groups(const RouteTask& task, int lane, int first, uint32_t (&key)[kValues]) {
  const int size = task.experts / task.groups;
  uint32_t mine = kTaken;  // lane g holds the score of group g
  for (int g = 0; g < task.groups; g++) {
    uint32_t top = kTaken, second = kTaken;
#pragma unroll
    for (int i = 0; i < kValues; i++) {
      const int id = first + i;
      const uint32_t k = id >= g * size && id < g * size + size ? key[i] : kTaken;
      second = max(second, min(top, k));
      top = max(top, k);
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask >>= 1) {
      const uint32_t other = shuffle_xor(top, mask), next = shuffle_xor(second, mask);
      second = max(max(second, next), min(top, other));
      top = max(top, other);
    }
    const float score = kSigmoid && size > 1 ? number_of(top) + number_of(second) : number_of(top);
    if (lane == g) mine = key_of(score);
  }
  uint32_t stay = 0;
  for (int r = 0; r < task.kept; r++) {
    const uint32_t best = row_reduce<kLanes>(mine, MaxKey());
    const int winner = __ffs(static_cast<int>(row_ballot<kLanes>(mine == best))) - 1;
    if (lane == winner) mine = kTaken;
    stay |= 1u << winner;
  }
#pragma unroll
  for (int i = 0; i < kValues; i++)
    if (first + i < task.experts && !(stay >> (first + i) / size & 1)) key[i] = kTaken;
}

// kSigmoid: scores are sigmoids, else the softmax. kLanes lanes a row, kValues experts a lane.
template <bool kSigmoid, int kLanes, int kValues, class T>
__global__ void __launch_bounds__(kRouteThreads) route_kernel(RouteTask task) {
  constexpr int kMost = kMaxTopk < kLanes * kValues ? kMaxTopk : kLanes * kValues, kSlots = kMost / kLanes;
  const int lane = threadIdx.x % kLanes, first = lane * kValues;
  const int64_t row = (int64_t{blockIdx.x} * kRouteThreads + threadIdx.x) / kLanes;
  const bool active = row < task.rows;  // lanes of other rows go on with the shuffles
  wait_for_previous();
  float x[kValues];
  uint32_t key[kValues];
  load_row<kValues, T>(task, active ? row : 0, first, x);
  bool nan = false;
#pragma unroll
  for (int i = 0; i < kValues; i++) {
    const bool inside = first + i < task.experts;
    nan |= inside && x[i] != x[i];
    const float by = kSigmoid && task.bias && inside ? sigmoid(x[i]) + task.bias[first + i] : x[i];
    key[i] = inside ? key_of(by) : kTaken;
  }
  nan = row_ballot<kLanes>(nan) != 0;
  if (task.groups > 1) keep_groups<kSigmoid, kLanes>(task, lane, first, key);

  float mine[kSlots] = {};  // result r is in lane r % kLanes, slot r / kLanes
  int id[kSlots] = {};
  float largest = 0, sum = 0;
  // By slots and not by r alone, and with selections in place of conditions: rows that share a warp do not part.
#pragma unroll
  for (int slot = 0; slot < kSlots; slot++) {
#pragma unroll 1
    for (int owner = 0; owner < kLanes && slot * kLanes + owner < task.topk; owner++) {
      uint32_t local = key[0];
#pragma unroll
      for (int i = 1; i < kValues; i++) local = max(local, key[i]);
      const uint32_t best = row_reduce<kLanes>(local, MaxKey());
      const int winner = kLanes == 1 ? 0 : __ffs(static_cast<int>(row_ballot<kLanes>(local == best))) - 1;
      // The winner's first key that is the best: its place, its logit, and out it goes.
      int at = 0;
      float logit = number_of(best);
#pragma unroll
      for (int i = kValues - 1; i >= 0; i--) {
        at = key[i] == best ? first + i : at;
        if (kSigmoid) logit = key[i] == best ? x[i] : logit;
      }
      at = from_lane<kLanes>(at, winner);
#pragma unroll
      for (int i = 0; i < kValues; i++) key[i] = first + i == at ? kTaken : key[i];
      if (kSigmoid) logit = from_lane<kLanes>(logit, winner);
      if (slot == 0 && owner == 0) largest = logit;
      const float score = kSigmoid ? sigmoid(logit) : exponential(logit - largest);
      sum += score;
      mine[slot] = lane == owner ? score : mine[slot];
      id[slot] = lane == owner ? at : id[slot];
    }
  }
  float factor = task.scale;
  if (kSigmoid) {
    if (task.renormalize) factor /= sum + kLeastSum;
  } else {
    if (!task.renormalize) {
      sum = 0;
#pragma unroll
      for (int i = 0; i < kValues; i++)
        if (first + i < task.experts) sum += exponential(x[i] - largest);
      sum = row_reduce<kLanes>(sum, Sum());
    }
    factor /= sum;
  }
  if (nan) factor = __uint_as_float(0x7fc00000u);
  if (!active) return;
  const int columns = task.topk + task.shared;
#pragma unroll
  for (int s = 0; s < kSlots; s++) {
    const int r = s * kLanes + lane;
    if (r >= task.topk) continue;
    task.weights[row * columns + r] = mine[s] * factor;
    task.ids[row * columns + r] = id[s];
  }
  for (int i = lane; i < task.shared; i += kLanes) {
    task.weights[row * columns + task.topk + i] = nan ? factor : 1.f;
    task.ids[row * columns + task.topk + i] = task.experts + i;
  }
}

template <bool kSigmoid>
void route(const char* op, const rk_tensor& logits, const rk_tensor& weights, const rk_tensor& ids, RouteTask task,
           rk_stream stream) {
  const int item = element_size(logits);
  task.logits = data_ptr<char>(logits);
  task.rows = logits.shape[0];
  task.stride = logits.strides[0] * item;
  task.experts = static_cast<int>(logits.shape[1]);
  task.topk = static_cast<int>(weights.shape[1]) - task.shared;
  task.packed =
      task.experts * item % 16 == 0 && task.stride % 16 == 0 && reinterpret_cast<uintptr_t>(task.logits) % 16 == 0;
  task.weights = data_ptr<float>(weights);
  task.ids = data_ptr<int32_t>(ids);
  dispatch_float(dtype_of(logits), [&](auto t) {
    using T = typename decltype(t)::type;
    const bool grouped = task.groups > 1;  // a lane holds a group's score
    const int lanes = task.experts > 128 || grouped ? 32
                      : task.experts > 64           ? 16
                      : task.experts > 32           ? 8
                      : task.experts > 8            ? 4
                                                    : 1;
    void (*kernel)(RouteTask) = task.experts > 256 ? route_kernel<kSigmoid, 32, 32, T>
                                : lanes == 32      ? route_kernel<kSigmoid, 32, 8, T>
                                : lanes == 16      ? route_kernel<kSigmoid, 16, 8, T>
                                : lanes == 8       ? route_kernel<kSigmoid, 8, 8, T>
                                : lanes == 4       ? route_kernel<kSigmoid, 4, 8, T>
                                                   : route_kernel<kSigmoid, 1, 8, T>;
    launch_dependent(op, logits.device, stream, kernel, blocks_for(task.rows, kRouteThreads / lanes, INT32_MAX),
                     kRouteThreads, task);
  });
}

// ------------------------------------------------------------------ sorting by expert

__global__ void __launch_bounds__(kAlignThreads) align_kernel(AlignTask task) {
  align(task);
}

// ------------------------------------------------------------------ sum over a token's experts

struct SumTask {
  const char* input;
  char* out;
  int64_t tokens, packs, token_stride, expert_stride, out_stride;  // strides in bytes
  int topk;
};

template <int N, class T>
__global__ void __launch_bounds__(kSumThreads) sum_kernel(SumTask task) {
  wait_for_previous();
  const int64_t total = task.tokens * task.packs;
  for (int64_t i = int64_t{blockIdx.x} * kSumThreads + threadIdx.x; i < total; i += int64_t{gridDim.x} * kSumThreads) {
    const int64_t token = quotient(i, task.packs);
    const int64_t column = remainder(i, task.packs) * N * static_cast<int>(sizeof(T));
    const char* input = task.input + token * task.token_stride + column;
    float sum[N] = {};
#pragma unroll 4
    for (int k = 0; k < task.topk; k++) {
      const auto pack = load_pack<N>(reinterpret_cast<const T*>(input + k * task.expert_stride));
#pragma unroll
      for (int j = 0; j < N; j++) sum[j] += to_float(pack.at[j]);
    }
    Pack<T, N> out;
#pragma unroll
    for (int j = 0; j < N; j++) from_float(sum[j], out.at[j]);
    store_pack<N>(reinterpret_cast<T*>(task.out + token * task.out_stride + column), out);
  }
}

}  // namespace

namespace backend {

void topk_softmax(const rk_topk_softmax_args& args, rk_stream stream) {
  RouteTask task{};
  task.renormalize = args.renormalize != 0;
  task.groups = args.num_expert_group > 1 ? args.num_expert_group : 1;
  task.kept = args.topk_group;
  task.scale = args.routed_scaling_factor != 0 ? args.routed_scaling_factor : 1;
  task.shared = args.num_fused_shared_experts;
  route<false>("topk_softmax", *args.gating_output, *args.topk_weights, *args.topk_ids, task, stream);
}

void topk_sigmoid(const rk_topk_sigmoid_args& args, rk_stream stream) {
  RouteTask task{};
  task.renormalize = args.renormalize != 0;
  task.bias = args.correction_bias ? data_ptr<float>(*args.correction_bias) : nullptr;
  task.groups = 1;
  task.scale = 1;
  task.shared = args.num_fused_shared_experts;
  route<true>("topk_sigmoid", *args.gating_output, *args.topk_weights, *args.topk_ids, task, stream);
}

void moe_fused_gate(const rk_moe_fused_gate_args& args, rk_stream stream) {
  RouteTask task{};
  task.renormalize = true;
  task.bias = data_ptr<float>(*args.bias);
  task.groups = args.num_expert_group;
  task.kept = args.topk_group;
  task.scale = args.routed_scaling_factor;
  task.shared = args.num_fused_shared_experts;
  route<true>("moe_fused_gate", *args.input, *args.topk_weights, *args.topk_ids, task, stream);
}

void moe_align_block_size(const rk_moe_align_block_size_args& args, rk_stream stream) {
  const rk_tensor& ids = *args.topk_ids;
  const AlignTask task{data_ptr<int32_t>(ids),
                       args.expert_map ? data_ptr<int32_t>(*args.expert_map) : nullptr,
                       static_cast<int>(ids.shape[0] * ids.shape[1]),
                       args.num_experts,
                       args.block_size,
                       data_ptr<int32_t>(*args.sorted_token_ids),
                       data_ptr<int32_t>(*args.expert_ids),
                       data_ptr<int32_t>(*args.num_tokens_post_padded),
                       nullptr,
                       INT_MAX};
  launch_dependent("moe_align_block_size", ids.device, stream, align_kernel, args.num_experts, kAlignThreads, task);
}

void moe_sum(const rk_moe_sum_args& args, rk_stream stream) {
  const rk_tensor &input = *args.input, &out = *args.out;
  const int item = element_size(input);
  const int64_t hidden = input.shape[2];
  SumTask task{
      data_ptr<char>(input),   data_ptr<char>(out),     input.shape[0],        hidden,
      input.strides[0] * item, input.strides[1] * item, out.strides[0] * item, static_cast<int>(input.shape[1])};
  const auto bits = reinterpret_cast<uintptr_t>(task.input) | reinterpret_cast<uintptr_t>(task.out) |
                    static_cast<uintptr_t>(task.token_stride | task.expert_stride | task.out_stride | hidden * item);
  dispatch_float(dtype_of(input), [&](auto t) {
    using T = typename decltype(t)::type;
    constexpr int N = kPackSize<T>;
    void (*kernel)(SumTask) = sum_kernel<1, T>;
    if (bits % 16 == 0) {
      kernel = sum_kernel<N, T>;
      task.packs = hidden / N;
    }
    launch_dependent("moe_sum", input.device, stream, kernel, blocks_for(task.tokens * task.packs, kSumThreads),
                     kSumThreads, task);
  });
}

}  // namespace backend
}  // namespace radix
