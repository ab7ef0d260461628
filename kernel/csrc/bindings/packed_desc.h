// A packed weight's description as Python holds it (`_bind.PackedDesc`): made once, handed to every call on the weight.
#pragma once

#include <string>

#include "bindings/exchange.h"
#include "radix_kernels/linear.h"

namespace radix::bind {

inline rk_dtype dtype_named(const std::string& name) {
  if (name == "bfloat16") return {RK_CODE_BFLOAT, 16, 1};
  if (name == "float16") return {RK_CODE_FLOAT, 16, 1};
  if (name == "float32") return {RK_CODE_FLOAT, 32, 1};
  if (name == "uint8") return {RK_CODE_UINT, 8, 1};
  throw py::type_error("pack_weight: dtype is " + name + ", expected bfloat16, float16 or float32");
}

struct PackedDesc {
  rk_packed_desc desc{sizeof desc};
  int64_t bytes = 0;

  PackedDesc(int64_t n, int64_t k, const std::string& dtype, uint32_t kind, uint32_t group, const std::string& scales,
             bool zeros, bool mins) {
    desc.dtype = dtype_named(dtype);
    desc.n = n;
    desc.k = k;
    desc.kind = kind;
    if (kind != RK_WEIGHT_DENSE) {
      desc.group = group;
      desc.scale_dtype = dtype_named(scales);
      desc.zeros = zeros;
      desc.mins = mins;
    }
    if (const rk_status status = rk_packed_weight_info(&desc, &bytes)) raise(status, rk_last_error());
  }

  const char* layout() const {
    switch (desc.layout) {
      case RK_LAYOUT_PAIRS16: return "pairs16";
      case RK_LAYOUT_LANES16: return "lanes16";
      case RK_LAYOUT_QUADS16: return "quads16";
      case RK_LAYOUT_NIBBLES16: return "nibbles16";
      case RK_LAYOUT_SUPERS16: return "supers16";
      case RK_LAYOUT_BYTES16: return "bytes16";
      default: return "fragments64";
    }
  }
};

}  // namespace radix::bind
