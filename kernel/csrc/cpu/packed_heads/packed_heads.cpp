// Products of heads on the CPU: each head of x and of out as a matrix of its own.
#include "api/packed_heads.h"

#include <deque>

#include "common/tensor.h"
#include "cpu/linear/products.h"

namespace radix {
namespace {

// Head `head` of a tensor [tokens, heads, width].
class Matrix {
 public:
  Matrix(const rk_tensor& of, int64_t head)
      : tensor_(of), shape_{of.shape[0], of.shape[2]}, strides_{of.strides[0], of.strides[2]} {
    tensor_.byte_offset += static_cast<uint64_t>(head * of.strides[1] * element_size(of));
    tensor_.ndim = 2;
    tensor_.shape = shape_;
    tensor_.strides = strides_;
  }
  Matrix(const Matrix&) = delete;
  Matrix& operator=(const Matrix&) = delete;
  operator const rk_tensor*() const { return &tensor_; }

 private:
  rk_tensor tensor_;
  int64_t shape_[2], strides_[2];
};

}  // namespace

void backend::linear_heads(const rk_linear_heads_args& args) {
  std::deque<Matrix> matrices;
  cpu::Products products(args.num_heads);
  for (int32_t h = 0; h < args.num_heads; h++) {
    rk_linear_args product{sizeof product, args.heads[h].desc};
    product.x = matrices.emplace_back(*args.x, h);
    product.packed = args.heads[h].packed;
    product.out = matrices.emplace_back(*args.out, h);
    products.add(product);
  }
  products.run();
}

}  // namespace radix
