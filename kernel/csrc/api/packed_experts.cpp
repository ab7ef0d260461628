// Packed experts: checks, and the layout of the workspace.
#include "api/packed_experts.h"

#include "common/gating.h"
#include "common/tensor.h"

using namespace radix;

namespace {

constexpr int64_t kAlign = 64;

// Cuts the workspace.
void place(PackedExpertsPlan& p) {
  p.fused = p.inner % 16 == 0;
  const auto take = [&](int64_t bytes) {
    const int64_t begin = p.bytes;
    p.bytes += (bytes + kAlign - 1) / kAlign * kAlign;
    return begin;
  };
  const int64_t pairs = p.tokens * p.topk;
  p.rows = take(pairs * p.hidden * p.item);
  p.gated = take(pairs * p.inner * p.item);
  p.gate_up = take(p.fused ? 0 : pairs * 2 * p.inner * p.item);
  p.places = take(pairs * static_cast<int64_t>(sizeof(int32_t)));
}

PackedExpertsPlan plan_of(const char* op, const rk_fused_experts_packed_args& a) {
  const Arg x(op, "hidden_states", a.hidden_states), ids(op, "topk_ids", a.topk_ids);
  x.backend_device().dtype(kFloats).ndim(2).last_contiguous();
  if (x->device.type != RK_DEVICE_CPU) x.reject(RK_UNSUPPORTED, "is on a GPU, this op runs on the CPU");
  ids.same_device(x).dtype({DType::i32}).ndim(2).contiguous();
  if (ids.size(0) != x.size(0)) ids.shape({x.size(0), -1}, "tokens of hidden_states");
  if (a.num_experts < 1 || !a.experts) fail(RK_INVALID, "%s: there are no experts", op);
  PackedExpertsPlan p{x.size(0), ids.size(1), x.size(1), 0, element_size(*x)};
  for (int e = 0; e < a.num_experts; e++) {
    const rk_packed_expert& expert = a.experts[e];
    if (!expert.w1_desc || !expert.w2_desc) fail(RK_INVALID, "%s: a weight of expert %d is missing", op, e);
    const rk_packed_desc &w1 = *expert.w1_desc, &w2 = *expert.w2_desc;
    if (e == 0) p.inner = w2.k;
    if (w1.k != p.hidden || w2.n != p.hidden || w2.k != p.inner || w1.n != 2 * p.inner)
      fail(RK_INVALID,
           "%s: weights of expert %d are [%lld, %lld] and [%lld, %lld], expected [%lld, %lld] and [%lld, %lld]", op, e,
           (long long)w1.n, (long long)w1.k, (long long)w2.n, (long long)w2.k, (long long)(2 * p.inner),
           (long long)p.hidden, (long long)p.hidden, (long long)p.inner);
  }
  place(p);
  return p;
}

void check_bias(const char* op, const char* name, const rk_tensor* tensor, const Arg& x, int64_t experts,
                int64_t outputs) {
  if (!tensor) return;
  const Arg bias(op, name, tensor);
  bias.same_device(x).dtype({dtype_of(*x), DType::f32}).shape({experts, outputs}, "experts, outputs").contiguous();
}

}  // namespace

int64_t radix::packed_experts_bytes(int64_t tokens, int64_t topk, int64_t hidden, int64_t inner, int64_t item) {
  PackedExpertsPlan p{tokens, topk, hidden, inner, item};
  place(p);
  return p.bytes + kAlign;  // the caller's memory may begin anywhere
}

rk_status rk_fused_experts_packed(const rk_fused_experts_packed_args* args, rk_stream) {
  return guard([&] {
    const char* op = "fused_experts_packed";
    const auto a = read_args(op, args);
    const PackedExpertsPlan plan = plan_of(op, a);
    const Arg x(op, "hidden_states", a.hidden_states), out(op, "out", a.out), workspace(op, "workspace", a.workspace);
    const Arg weights(op, "topk_weights", a.topk_weights), ids(op, "topk_ids", a.topk_ids);
    weights.same_device(x).dtype({DType::f32}).same_shape(ids).contiguous();
    out.same_device(x).same_dtype(x).same_shape(x).last_contiguous().writable();
    if (a.expert_map) {
      const Arg map(op, "expert_map", a.expert_map);
      map.same_device(x).dtype({DType::i32}).ndim(1).contiguous();
    }
    check_gating(op, a.gating);
    check_bias(op, "bias1", a.bias1, x, a.num_experts, 2 * plan.inner);
    check_bias(op, "bias2", a.bias2, x, a.num_experts, plan.hidden);
    workspace.same_device(x).dtype({DType::u8}).ndim(1).contiguous().writable();
    if (workspace.size(0) < plan.bytes + kAlign)
      workspace.reject(RK_INVALID, "has %lld bytes, expected at least %lld", (long long)workspace.size(0),
                       (long long)(plan.bytes + kAlign));
    if (out.numel() == 0) return;
    const auto begin = reinterpret_cast<uintptr_t>(data_ptr<char>(*workspace));
    backend::fused_experts_packed(a, plan, reinterpret_cast<char*>((begin + kAlign - 1) / kAlign * kAlign));
  });
}

rk_status rk_fused_experts_packed_workspace_size(const rk_fused_experts_packed_args* args, int64_t* bytes) {
  return guard([&] {
    const char* op = "fused_experts_packed_workspace_size";
    if (!bytes) fail(RK_INVALID, "%s: bytes is required", op);
    *bytes = plan_of(op, read_args(op, args)).bytes + kAlign;  // the caller's memory may begin anywhere
  });
}
