// The host's Rows (common/tensor.h) as kernels see them, and whether their rows can be read 16 bytes at a time.
#pragma once

#include "common/tensor.h"
#include "gpu/device/compat.h"

namespace radix::gpu {

struct DeviceRows {
  char* data;
  int64_t count;
  int dims;
  int64_t size[kMaxDims], stride[kMaxDims];

  DeviceRows(const Rows& rows) : data(rows.data), count(rows.count), dims(rows.dims) {
    for (int d = 0; d < kMaxDims; d++) {
      size[d] = rows.size[d];
      stride[d] = rows.stride[d];
    }
  }

  template <class T>
  __device__ T* at(int64_t row) const {
    if (dims <= 1) return reinterpret_cast<T*>(data + row * stride[0]);
    int64_t offset = 0;
    for (int d = 0; d < dims; d++) {
      offset += remainder(row, size[d]) * stride[d];
      row = quotient(row, size[d]);
    }
    return reinterpret_cast<T*>(data + offset);
  }

  // Whether EvenRows can stand for them.
  bool even() const { return dims <= 1; }

  bool aligned(int bytes) const {
    bool ok = reinterpret_cast<uintptr_t>(data) % bytes == 0;
    for (int d = 0; d < dims; d++) ok = ok && stride[d] % bytes == 0;
    return ok;
  }
};

// Rows that step evenly, as those of nearly every call do. Dividing by the sizes of DeviceRows, which such rows never
// come to, still costs a kernel a third of its registers.
struct EvenRows {
  char* data;
  int64_t count, stride;

  explicit EvenRows(const DeviceRows& rows) : data(rows.data), count(rows.count), stride(rows.stride[0]) {}

  template <class T>
  __device__ T* at(int64_t row) const {
    return reinterpret_cast<T*>(data + row * stride);
  }
};

}  // namespace radix::gpu
