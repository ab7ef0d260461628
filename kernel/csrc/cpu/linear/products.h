// Products of one op, whose tasks the threads share as one list (jobs.h).
#pragma once

#include <vector>

#include "api/linear.h"
#include "cpu/linear/kernels.h"

namespace radix::cpu {

class Products {
 public:
  explicit Products(size_t most) {
    descs_.reserve(most);
    calls_.reserve(most);
  }

  // A product that rk_linear would take, or its Error. Its tensors live until run() has returned; none reads what
  // another one writes.
  void add(const rk_linear_args& args) { calls_.push_back(checked_linear(&args, &descs_.emplace_back())); }

  void run() const {
    if (!calls_.empty()) linear_kernels().products(calls_.data(), static_cast<int64_t>(calls_.size()), nullptr);
  }

 private:
  std::vector<rk_packed_desc> descs_;  // never moved: calls point to them
  std::vector<rk_linear_args> calls_;
};

}  // namespace radix::cpu
