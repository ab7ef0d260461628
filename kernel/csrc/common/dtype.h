// Element types: the tag that a tensor carries, and the storage types kernels are written in.
#pragma once

#include <cstdint>

#include "radix_kernels/types.h"

namespace radix {

// The dtype's DLPack code and bits in one word, so that tags compare and switch as integers.
enum class DType : uint32_t {
  i32 = RK_CODE_INT << 8 | 32,
  i64 = RK_CODE_INT << 8 | 64,
  i8 = RK_CODE_INT << 8 | 8,
  u8 = RK_CODE_UINT << 8 | 8,
  f16 = RK_CODE_FLOAT << 8 | 16,
  f32 = RK_CODE_FLOAT << 8 | 32,
  f64 = RK_CODE_FLOAT << 8 | 64,
  bf16 = RK_CODE_BFLOAT << 8 | 16,
  f8e4m3 = RK_CODE_FLOAT8_E4M3FN << 8 | 8,
  f8e4m3fnuz = RK_CODE_FLOAT8_E4M3FNUZ << 8 | 8,
};

inline DType dtype_of(rk_dtype dtype) {
  return static_cast<DType>(uint32_t{dtype.code} << 8 | dtype.bits);
}
inline DType dtype_of(const rk_tensor& t) {
  return dtype_of(t.dtype);
}

// Storage only: arithmetic is done in float32 (simd.h has the conversions).
struct bf16 {
  uint16_t bits;
};
struct f16 {
  uint16_t bits;
};
static_assert(sizeof(bf16) == 2 && sizeof(f16) == 2);

template <class T>
struct Type {
  using type = T;
};

// Calls fn(Type<T>{}) with the storage type of a bf16, fp16 or fp32 tag. The tag was checked at the border.
template <class Fn>
inline void dispatch_float(DType dtype, Fn&& fn) {
  switch (dtype) {
    case DType::bf16: return fn(Type<bf16>{});
    case DType::f16: return fn(Type<f16>{});
    default: return fn(Type<float>{});
  }
}

}  // namespace radix
