// Routing and the sum over experts on the CPU: tokens split over the pool.
#include "cpu/moe/moe.h"

#include "api/moe.h"
#include "cpu/thread_pool.h"

namespace radix::backend {
namespace {

constexpr int64_t kGrainElements = 16 * 1024;

void route(const rk_tensor& logits, const rk_tensor& weights, const rk_tensor& ids, cpu::RouteTask task) {
  task.logits = data_ptr<char>(logits);
  task.stride = logits.strides[0] * element_size(logits);
  task.experts = logits.shape[1];
  task.topk = weights.shape[1] - task.shared;
  task.dtype = dtype_of(logits);
  task.weights = data_ptr<float>(weights);
  task.ids = data_ptr<int32_t>(ids);
  const auto kernel = cpu::moe_kernels().route;
  cpu::parallel_for(logits.shape[0], 1 + kGrainElements / (task.experts * (1 + task.topk)),
                    [&](int64_t begin, int64_t end) { kernel(task, begin, end); });
}

}  // namespace

void topk_softmax(const rk_topk_softmax_args& args, rk_stream) {
  cpu::RouteTask task{};
  task.renormalize = args.renormalize != 0;
  task.groups = args.num_expert_group > 1 ? args.num_expert_group : 1;
  task.kept = args.topk_group;
  task.scale = args.routed_scaling_factor != 0 ? args.routed_scaling_factor : 1;
  task.shared = args.num_fused_shared_experts;
  route(*args.gating_output, *args.topk_weights, *args.topk_ids, task);
}

void topk_sigmoid(const rk_topk_sigmoid_args& args, rk_stream) {
  cpu::RouteTask task{};
  task.sigmoid = true;
  task.renormalize = args.renormalize != 0;
  task.bias = args.correction_bias ? data_ptr<float>(*args.correction_bias) : nullptr;
  task.groups = 1;
  task.scale = 1;
  task.shared = args.num_fused_shared_experts;
  route(*args.gating_output, *args.topk_weights, *args.topk_ids, task);
}

void moe_fused_gate(const rk_moe_fused_gate_args& args, rk_stream) {
  cpu::RouteTask task{};
  task.sigmoid = true;
  task.renormalize = true;
  task.bias = data_ptr<float>(*args.bias);
  task.groups = args.num_expert_group;
  task.kept = args.topk_group;
  task.scale = args.routed_scaling_factor;
  task.shared = args.num_fused_shared_experts;
  route(*args.input, *args.topk_weights, *args.topk_ids, task);
}

void moe_sum(const rk_moe_sum_args& args, rk_stream) {
  const rk_tensor &input = *args.input, &out = *args.out;
  const int64_t item = element_size(input);
  const cpu::SumTask task{data_ptr<char>(input), data_ptr<char>(out), input.strides[0] * item, input.strides[1] * item,
                          out.strides[0] * item, input.shape[1],      input.shape[2],          dtype_of(input)};
  const auto kernel = cpu::moe_kernels().sum;
  cpu::parallel_for(input.shape[0], 1 + kGrainElements / (1 + task.topk * task.hidden),
                    [&](int64_t begin, int64_t end) { kernel(task, begin, end); });
}

}  // namespace radix::backend
