// MoE family: checks once for every backend, then the backend's kernel.
#include "api/moe.h"

#include <algorithm>

#include "common/check.h"

using namespace radix;

namespace {

constexpr int64_t kMaxExperts = 1024, kMaxTopk = 32, kMaxGroups = 32;

// Returns false when there is nothing to do.
// shared: columns that are no choice among the experts.
bool check_routing(const Arg& gating, const Arg& weights, const Arg& ids, int64_t shared = 0) {
  gating.backend_device().dtype(kFloats).ndim(2).last_contiguous();
  const int64_t experts = gating.size(1);
  if (experts < 1 || experts > kMaxExperts)
    gating.reject(RK_UNSUPPORTED, "has %ld experts, supported are 1 to %ld", experts, kMaxExperts);
  weights.same_device(gating).dtype({DType::f32}).shape({gating.size(0), -1}, "tokens of the logits");
  const int64_t topk = weights.size(1), most = std::min(experts + shared, kMaxTopk);
  if (topk < 1 || topk > most) weights.reject(RK_INVALID, "has %ld columns (topk), expected 1 to %ld", topk, most);
  ids.same_device(gating).dtype({DType::i32}).same_shape(weights);
  weights.contiguous().writable();
  ids.contiguous().writable();
  return gating.size(0) > 0;
}

void check_bias(const Arg& gating, const Arg& bias) {
  bias.same_device(gating).dtype({DType::f32}).shape({gating.size(1)}, "experts").contiguous();
}

void check_shared(const char* op, const Arg& weights, int64_t shared) {
  const int64_t most = weights.size(1) - 1;
  if (shared < 0 || shared > most)
    fail(RK_INVALID, "%s: num_fused_shared_experts is %ld, expected 0 to %ld (topk - 1)", op, shared, most);
}

// kept of the equal groups of experts stay, which have experts for all columns of weights but the shared ones.
void check_groups(const char* op, const Arg& gating, const Arg& weights, int64_t groups, int64_t kept,
                  int64_t shared = 0) {
  const int64_t experts = gating.size(1);
  if (groups < 1 || groups > kMaxGroups || experts % groups != 0)
    gating.reject(RK_INVALID, "has %ld experts in num_expert_group = %ld groups, expected 1 to %ld equal groups",
                  experts, groups, kMaxGroups);
  if (kept < 1 || kept > groups)
    fail(RK_INVALID, "%s: topk_group is %ld, expected 1 to %ld (num_expert_group)", op, kept, groups);
  if (weights.size(1) - shared > experts / groups * kept)
    weights.reject(RK_INVALID, "has %ld columns (topk), but the %ld groups that stay have %ld experts", weights.size(1),
                   kept, experts / groups * kept);
}

}  // namespace

rk_status rk_topk_softmax(const rk_topk_softmax_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "topk_softmax";
    const auto a = read_args(op, args);
    const Arg gating(op, "gating_output", a.gating_output), weights(op, "topk_weights", a.topk_weights);
    const int64_t shared = a.num_fused_shared_experts;
    const bool any = check_routing(gating, weights, Arg(op, "topk_ids", a.topk_ids), shared);
    check_shared(op, weights, shared);
    if (a.num_expert_group > 1) check_groups(op, gating, weights, a.num_expert_group, a.topk_group, shared);
    if (any) backend::topk_softmax(a, stream);
  });
}

rk_status rk_topk_sigmoid(const rk_topk_sigmoid_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "topk_sigmoid";
    const auto a = read_args(op, args);
    const Arg gating(op, "gating_output", a.gating_output), weights(op, "topk_weights", a.topk_weights);
    const bool any = check_routing(gating, weights, Arg(op, "topk_ids", a.topk_ids), a.num_fused_shared_experts);
    check_shared(op, weights, a.num_fused_shared_experts);
    if (a.correction_bias) check_bias(gating, Arg(op, "correction_bias", a.correction_bias));
    if (any) backend::topk_sigmoid(a, stream);
  });
}

rk_status rk_moe_fused_gate(const rk_moe_fused_gate_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "moe_fused_gate";
    const auto a = read_args(op, args);
    const Arg input(op, "input", a.input), weights(op, "topk_weights", a.topk_weights);
    const bool any = check_routing(input, weights, Arg(op, "topk_ids", a.topk_ids), a.num_fused_shared_experts);
    check_bias(input, Arg(op, "bias", a.bias));
    const int64_t shared = a.num_fused_shared_experts;
    check_shared(op, weights, shared);
    check_groups(op, input, weights, a.num_expert_group, a.topk_group, shared);
    if (any) backend::moe_fused_gate(a, stream);
  });
}

rk_status rk_moe_align_block_size(const rk_moe_align_block_size_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "moe_align_block_size";
    const auto a = read_args(op, args);
    const Arg ids(op, "topk_ids", a.topk_ids), sorted(op, "sorted_token_ids", a.sorted_token_ids);
    const Arg experts(op, "expert_ids", a.expert_ids), total(op, "num_tokens_post_padded", a.num_tokens_post_padded);
    ids.backend_device().dtype({DType::i32}).ndim(2).contiguous();
    const int64_t count = a.num_experts, block = a.block_size, n = ids.numel();
    if (count < 1 || count > kMaxExperts)
      fail(RK_INVALID, "%s: num_experts is %ld, expected 1 to %ld", op, count, kMaxExperts);
    if (block < 1) fail(RK_INVALID, "%s: block_size is %ld, expected at least 1", op, block);
    const int64_t blocks = (n + (n < count ? n : count) * (block - 1)) / block;
    if (blocks * block > INT32_MAX) ids.reject(RK_INVALID, "needs %ld places, more than int32 counts", blocks * block);
    if (a.expert_map) {
      const Arg map(op, "expert_map", a.expert_map);
      map.same_device(ids).dtype({DType::i32}).shape({count}, "num_experts").contiguous();
    }
    for (const Arg* out : {&sorted, &experts, &total})
      out->same_device(ids).dtype({DType::i32}).ndim(1).contiguous().writable();
    if (sorted.size(0) < blocks * block)
      sorted.reject(RK_INVALID, "has %ld elements, expected at least %ld", sorted.size(0), blocks * block);
    if (experts.size(0) < blocks)
      experts.reject(RK_INVALID, "has %ld elements, expected at least %ld", experts.size(0), blocks);
    total.shape({1}, "one number");
    backend::moe_align_block_size(a, stream);
  });
}

rk_status rk_moe_sum(const rk_moe_sum_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "moe_sum";
    const auto a = read_args(op, args);
    const Arg input(op, "input", a.input), out(op, "out", a.out);
    input.backend_device().dtype(kFloats).ndim(3).last_contiguous();
    out.same_device(input).same_dtype(input).shape({input.size(0), input.size(2)}, "tokens and hidden size of input");
    out.last_contiguous().writable();
    if (out.numel() > 0) backend::moe_sum(a, stream);
  });
}
