// A tensor [n, columns] with free strides.
#pragma once

#include "common/tensor.h"

namespace radix::cpu::linear_layout {

template <class T>
struct Matrix {
  T* data;
  int64_t row, col;
  explicit Matrix(const rk_tensor& t) : data(data_ptr<T>(t)), row(t.strides[0]), col(t.strides[1]) {}
  T& operator()(int64_t n, int64_t k) const { return data[n * row + k * col]; }
};

}  // namespace radix::cpu::linear_layout
