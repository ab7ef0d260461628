#include "radix_kernels/packed_experts.h"

#include <deque>
#include <vector>

#include "bindings/held.h"
#include "bindings/packed_desc.h"

namespace radix::bind {
namespace {

// The Python object `_bind.PackedExperts`: the weights of all experts. radix_kernels.PackedExperts is its public face.
class PackedExperts {
 public:
  // w1, w2 are (PackedDesc, data).
  void add(const py::tuple& w1, const py::tuple& w2) {
    Call call("pack_experts");
    rk_packed_expert expert{};
    expert.w1_desc = desc(w1[0]);
    expert.w1 = held_.emplace_back(call, "w1", w1[1]).tensor();
    expert.w2_desc = desc(w2[0]);
    expert.w2 = held_.emplace_back(call, "w2", w2[1]).tensor();
    experts_.push_back(expert);
  }

  int64_t workspace_size(py::handle hidden_states, py::handle topk_ids) const {
    Call call("fused_experts_packed");
    rk_fused_experts_packed_args args = base();
    args.hidden_states = call.in("hidden_states", hidden_states);
    args.topk_ids = call.in("topk_ids", topk_ids);
    int64_t bytes = 0;
    if (const rk_status status = rk_fused_experts_packed_workspace_size(&args, &bytes)) raise(status, rk_last_error());
    return bytes;
  }

  void run(py::handle hidden_states, py::handle topk_weights, py::handle topk_ids, py::handle expert_map,
           py::handle out, py::handle workspace) const {
    Call call("fused_experts_packed");
    rk_fused_experts_packed_args args = base();
    args.hidden_states = call.in("hidden_states", hidden_states);
    args.topk_weights = call.in("topk_weights", topk_weights);
    args.topk_ids = call.in("topk_ids", topk_ids);
    args.expert_map = call.optional_in("expert_map", expert_map);
    args.out = call.out("out", out);
    args.workspace = call.out("workspace", workspace);
    call.run(rk_fused_experts_packed, args);
  }

 private:
  const rk_packed_desc* desc(const py::object& object) {
    descs_.push_back(object);
    return &object.cast<const PackedDesc&>().desc;
  }

  rk_fused_experts_packed_args base() const {
    rk_fused_experts_packed_args args{sizeof args};
    args.num_experts = static_cast<int32_t>(experts_.size());
    args.experts = experts_.data();
    return args;
  }

  std::vector<rk_packed_expert> experts_;
  std::deque<Held> held_;  // their addresses are in experts_
  std::vector<py::object> descs_;
};

}  // namespace

void bind_packed_experts(py::module_& m) {
  py::class_<PackedExperts>(m, "PackedExperts")
      .def(py::init<>())
      .def("add", &PackedExperts::add)
      .def("workspace_size", &PackedExperts::workspace_size)
      .def("run", &PackedExperts::run);
}

}  // namespace radix::bind
