// The weights of heads as Python holds them; a decoder reads them too.
#pragma once

#include <vector>

#include "bindings/held.h"
#include "radix_kernels/packed_heads.h"

namespace radix::bind {

// The Python object `_bind.PackedHeads`. radix_kernels.PackedHeads is its public face.
class PackedHeads {
 public:
  // weights: (PackedDesc, data) of each head.
  explicit PackedHeads(const py::list& weights) {
    for (const auto& each : weights) {
      Call call("pack_heads");  // has room for the tensors of one op
      const auto weight = py::cast<py::tuple>(each);
      rk_packed_head head{};
      head.desc = keep_.desc(weight[0]);
      head.packed = keep_.tensor(call, "weight", weight[1]);
      heads_.push_back(head);
    }
  }

  void run(py::handle x, py::handle out) const {
    Call call("linear_heads");
    rk_linear_heads_args args{sizeof args, static_cast<int32_t>(heads_.size()), heads_.data()};
    args.x = call.in("x", x);
    args.out = call.out("out", out);
    call.run(rk_linear_heads, args);
  }

  // They stay where they are as long as this object lives: a decoder points at them.
  const std::vector<rk_packed_head>& heads() const { return heads_; }

 private:
  std::vector<rk_packed_head> heads_;
  Keeper keep_;
};

}  // namespace radix::bind
