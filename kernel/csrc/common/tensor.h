// Views that kernels work on: a typed pointer and the strides they need, without the descriptor.
#pragma once

#include "common/check.h"

namespace radix {

template <class T>
inline T* data_ptr(const rk_tensor& t) {
  return reinterpret_cast<T*>(static_cast<char*>(t.data) + t.byte_offset);
}

inline int element_size(const rk_tensor& t) {
  return t.dtype.bits / 8;
}

// A checked int32 or int64 tensor of one dimension (positions, slots, ids), read as int64.
class Indices {
 public:
  explicit Indices(const rk_tensor& t)
      : data_(data_ptr<char>(t)),
        count_(t.shape[0]),
        step_(t.strides[0] * element_size(t)),
        wide_(t.dtype.bits == 64) {}

  int64_t count() const { return count_; }
  int64_t operator[](int64_t i) const {
    const char* p = data_ + i * step_;
    return wide_ ? *reinterpret_cast<const int64_t*>(p) : *reinterpret_cast<const int32_t*>(p);
  }

 private:
  const char* data_;
  int64_t count_, step_;
  bool wide_;
};

// The rows of a tensor: everything but its last `inner` dimensions, in row-major order, with free strides.
// Neighbouring dimensions that step evenly are merged, so the common case is a single multiplication a row.
struct Rows {
  char* data = nullptr;
  int64_t count = 1;
  int dims = 0;                   // merged dimensions left
  int64_t size[kMaxDims] = {};    // innermost first
  int64_t stride[kMaxDims] = {};  // in bytes

  Rows() = default;
  explicit Rows(const rk_tensor& t, int inner = 1) : data(data_ptr<char>(t)) {
    const int64_t item = element_size(t);
    for (int i = t.ndim - 1 - inner; i >= 0; i--) {
      const int64_t n = t.shape[i], step = t.strides[i] * item;
      count *= n;
      if (n == 1) continue;
      if (dims > 0 && step == size[dims - 1] * stride[dims - 1]) {
        size[dims - 1] *= n;
      } else {
        size[dims] = n;
        stride[dims++] = step;
      }
    }
  }

  template <class T>
  T* at(int64_t row) const {
    if (dims <= 1) return reinterpret_cast<T*>(data + row * stride[0]);
    int64_t offset = 0;
    for (int d = 0; d < dims; d++) {
      offset += row % size[d] * stride[d];
      row /= size[d];
    }
    return reinterpret_cast<T*>(data + offset);
  }
};

}  // namespace radix
