// The weights of heads as Python holds them; a decoder reads them too.
#pragma once

#include <vector>

#include "bindings/held.h"
#include "radix_kernels/packed_heads.h"

namespace radix::bind {

// The Python object `_bind.PackedHeads`. radix_kernels.PackedHeads is its public face.
class PackedHeads {
 public:
  void add(const py::object& desc, py::handle data) {
    Call call("pack_heads");
    rk_packed_head head{};
    head.desc = keep_.desc(desc);
    head.packed = keep_.tensor(call, "weight", data);
    heads_.push_back(head);
  }

  void run(py::handle x, py::handle out) const {
    Call call("linear_heads");
    rk_linear_heads_args args{sizeof args, static_cast<int32_t>(heads_.size()), heads_.data()};
    args.x = call.in("x", x);
    args.out = call.out("out", out);
    call.run(rk_linear_heads, args);
  }

  const std::vector<rk_packed_head>& heads() const { return heads_; }

 private:
  std::vector<rk_packed_head> heads_;
  Keeper keep_;
};

}  // namespace radix::bind
