// The weights of all experts as Python holds them; a decoder reads them too.
#pragma once

#include <vector>

#include "bindings/held.h"
#include "radix_kernels/packed_experts.h"

namespace radix::bind {

// (number, alpha, limit)
inline rk_gating gating_of(const py::tuple& parts) {
  return {parts[0].cast<int32_t>(), parts[1].cast<float>(), parts[2].cast<float>()};
}

// The Python object `_bind.PackedExperts`: the weights of all experts. radix_kernels.PackedExperts is its public face.
class PackedExperts {
 public:
  // weights: (w1, w2) of each expert, both (PackedDesc, data).
  explicit PackedExperts(const py::list& weights) {
    for (const auto& each : weights) {
      const auto pair = py::cast<py::tuple>(each);
      add(pair[0].cast<py::tuple>(), pair[1].cast<py::tuple>());
    }
    args_.experts = experts_.data();
    args_.num_experts = static_cast<int32_t>(experts_.size());
  }

  int64_t workspace_size(py::handle hidden_states, py::handle topk_ids) const {
    Call call("fused_experts_packed");
    rk_fused_experts_packed_args args = args_;
    args.hidden_states = call.in("hidden_states", hidden_states);
    args.topk_ids = call.in("topk_ids", topk_ids);
    int64_t bytes = 0;
    if (const rk_status status = rk_fused_experts_packed_workspace_size(&args, &bytes)) raise(status, rk_last_error());
    return bytes;
  }

  // gating: number, alpha, limit.
  void run(py::handle hidden_states, py::handle topk_weights, py::handle topk_ids, py::handle bias1, py::handle bias2,
           const py::tuple& gating, py::handle expert_map, py::handle out, py::handle workspace) const {
    Call call("fused_experts_packed");
    rk_fused_experts_packed_args args = args_;
    args.hidden_states = call.in("hidden_states", hidden_states);
    args.topk_weights = call.in("topk_weights", topk_weights);
    args.topk_ids = call.in("topk_ids", topk_ids);
    args.bias1 = call.optional_in("bias1", bias1);
    args.bias2 = call.optional_in("bias2", bias2);
    args.gating = gating_of(gating);
    args.expert_map = call.optional_in("expert_map", expert_map);
    args.out = call.out("out", out);
    args.workspace = call.out("workspace", workspace);
    call.run(rk_fused_experts_packed, args);
  }

  // They stay where they are as long as this object lives: a decoder points at them.
  const std::vector<rk_packed_expert>& experts() const { return experts_; }

 private:
  void add(const py::tuple& w1, const py::tuple& w2) {
    Call call("pack_experts");
    rk_packed_expert expert{};
    expert.w1_desc = keep_.desc(w1[0]);
    expert.w1 = keep_.tensor(call, "w1", w1[1]);
    expert.w2_desc = keep_.desc(w2[0]);
    expert.w2 = keep_.tensor(call, "w2", w2[1]);
    experts_.push_back(expert);
  }

  rk_fused_experts_packed_args args_{sizeof(rk_fused_experts_packed_args)};  // what all calls share
  std::vector<rk_packed_expert> experts_;
  Keeper keep_;
};

}  // namespace radix::bind
