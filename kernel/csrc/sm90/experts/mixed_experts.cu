// The entry of experts over packed weights: from checked tensors to one MixedProblem, and the kernel by kind and group.
#include "api/experts.h"
#include "radix_kernels/linear.h"
#include "sm90/experts/mixed_problem.cuh"
#include "sm90/experts/workspace.cuh"

namespace radix {
namespace experts {
namespace {

linear::Layout layout_of(const rk_fused_experts_mixed_args& args, int64_t n, int64_t k) {
  rk_packed_desc desc{sizeof desc};
  desc.kind = args.kind;
  desc.group = args.group;
  desc.scale_dtype = args.scale_dtype;
  desc.zeros = args.zeros;
  desc.n = n;
  desc.k = k;
  return linear::Layout(desc);
}

linear::MixedWeights weights_of(const rk_fused_experts_mixed_args& args, const rk_tensor& packed, int64_t n,
                                int64_t k) {
  return linear::mixed_weights(layout_of(args, n, k), data_ptr<char>(packed), packed.strides[0],
                               dtype_of(args.scale_dtype));
}

MixedBias bias_of(const rk_tensor* bias) {
  if (!bias) return {};
  return {data_ptr<char>(*bias), dtype_of(*bias) == DType::f32};
}

Routing routing_of(const rk_fused_experts_mixed_args& args) {
  Routing r = {};
  r.ids = data_ptr<int32_t>(*args.topk_ids);
  r.map = args.expert_map ? data_ptr<int32_t>(*args.expert_map) : nullptr;
  r.weights = data_ptr<float>(*args.topk_weights);
  r.tokens = static_cast<int>(args.topk_ids->shape[0]);
  r.topk = static_cast<int>(args.topk_ids->shape[1]);
  r.experts = static_cast<int>(args.w1->shape[0]);
  r.named = args.expert_map ? static_cast<int>(args.expert_map->shape[0]) : r.experts;
  return r;
}

MixedProblem problem_of(const rk_fused_experts_mixed_args& args, rk_stream stream) {
  const rk_tensor &x = *args.hidden_states, &out = *args.out;
  MixedProblem m = {};
  Problem& q = m.q;
  q.op = "fused_experts_mixed";
  q.device = x.device;
  q.stream = stream;
  q.type = dtype_of(x);
  q.routing = routing_of(args);
  q.x = data_ptr<char>(x);
  q.x_step = x.strides[0] * 2;
  q.experts = q.routing.experts;
  q.hidden = static_cast<int>(x.shape[1]);
  q.inter = static_cast<int>(args.inter_size);
  q.out = data_ptr<char>(out);
  q.out_step = out.strides[0];
  q.workspace = data_ptr<char>(*args.workspace);
  m.w1 = weights_of(args, *args.w1, 2 * q.inter, q.hidden);
  m.w2 = weights_of(args, *args.w2, q.hidden, q.inter);
  m.bias1 = bias_of(args.bias1);
  m.bias2 = bias_of(args.bias2);
  m.activation.alpha = 1;
  if (args.activation == RK_ACTIVATION_SWIGLU_CLAMPED) m.activation = {args.limit, args.alpha};
  return m;
}

using Launch = void (*)(const MixedProblem&, const Scratch&);

template <class T, linear::Code kCode, int kGroup>
void launch(const MixedProblem& m, const Scratch& s) {
  m.takes_mixed_mma() ? grouped_mixed_mma<T, kCode, kGroup>(m, s) : grouped_mixed<T, kCode, kGroup>(m, s);
}

template <class T>
Launch launch_of(uint32_t kind, uint32_t group) {
  if (kind == RK_WEIGHT_MXFP4) return launch<T, linear::Code::e2m1, 32>;
  if (kind == RK_WEIGHT_INT8) return launch<T, linear::Code::s8, 128>;
  switch (group) {
    case 32: return launch<T, linear::Code::u4, 32>;
    case 64: return launch<T, linear::Code::u4, 64>;
    default: return launch<T, linear::Code::u4, 128>;
  }
}

}  // namespace
}  // namespace experts

namespace backend {

using namespace experts;

int64_t mixed_weight_bytes(const rk_fused_experts_mixed_args& args, int64_t n, int64_t k) {
  return layout_of(args, n, k).bytes;
}

void fused_experts_mixed(const rk_fused_experts_mixed_args& args, rk_stream stream) {
  const MixedProblem m = problem_of(args, stream);
  const Problem& q = m.q;
  const Workspace at(
      {sizeof(rk_fused_experts_sizes), q.routing.tokens, q.routing.topk, q.routing.named, q.hidden, q.inter});
  const Launch run =
      q.type == DType::bf16 ? launch_of<bf16>(args.kind, args.group) : launch_of<f16>(args.kind, args.group);
  run(m, at.scratch(q.workspace));
}

}  // namespace backend
}  // namespace radix
