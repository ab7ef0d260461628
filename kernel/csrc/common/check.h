// Checks at the border. Every text names the op, the argument, what it got and what it wants.
//
//   Arg input("rmsnorm", "input", args.input);          // not NULL, sane, has storage
//   input.backend_device().min_ndim(1).dtype(kFloats).last_contiguous();
#pragma once

#include <cstring>
#include <initializer_list>
#include <string>

#include "common/dtype.h"
#include "common/error.h"

namespace radix {

constexpr int kMaxDims = 8;
constexpr std::initializer_list<DType> kFloats = {DType::bf16, DType::f16, DType::f32};

// Copies a caller's args struct into one of this library's version: members the caller does not know become zero.
template <class Args>
Args read_args(const char* op, const Args* args) {
  if (!args) fail(RK_INVALID, "%s: args is NULL", op);
  if (args->struct_size < sizeof(uint32_t) || args->struct_size > sizeof(Args))
    fail(RK_INVALID, "%s: struct_size is %u, this library knows at most %zu (built for another version?)", op,
         args->struct_size, sizeof(Args));
  Args out{};
  std::memcpy(&out, args, args->struct_size);
  return out;
}

// One tensor argument under check. Methods return *this, so that checks read as a sentence; the first that fails
// throws.
class Arg {
 public:
  Arg(const char* op, const char* name, const rk_tensor* tensor);

  const rk_tensor& operator*() const { return *t_; }
  const rk_tensor* operator->() const { return t_; }
  const char* name() const { return name_; }
  // Size of a dimension; negative counts from the end.
  int64_t size(int dim) const { return t_->shape[dim < 0 ? dim + t_->ndim : dim]; }
  int64_t stride(int dim) const { return t_->strides[dim < 0 ? dim + t_->ndim : dim]; }
  int64_t numel() const;
  DType type() const { return dtype_of(*t_); }

  // Lives on a device that this library has kernels for.
  const Arg& backend_device() const;
  const Arg& same_device(const Arg& other) const;
  const Arg& dtype(std::initializer_list<DType> allowed) const;
  const Arg& same_dtype(const Arg& other) const;
  const Arg& ndim(int n) const;
  const Arg& min_ndim(int n) const;
  // -1 in `want` accepts any size; `why` says where the numbers come from, e.g. "last dimension of input".
  const Arg& shape(std::initializer_list<int64_t> want, const char* why) const;
  const Arg& same_shape(const Arg& other) const;
  const Arg& last_contiguous() const;
  const Arg& contiguous() const;
  // Written by the op: no two indices may name one element (an expanded tensor).
  const Arg& writable() const;

  // For checks that only the op knows: fails with "op: name <text>".
  [[noreturn]] void reject(rk_status status, const char* format, ...) const __attribute__((format(printf, 3, 4)));

 private:
  const char* op_;
  const char* name_;
  const rk_tensor* t_;
};

std::string shape_text(const rk_tensor& t);
std::string device_text(rk_device device);
std::string dtype_text(rk_dtype dtype);

}  // namespace radix
