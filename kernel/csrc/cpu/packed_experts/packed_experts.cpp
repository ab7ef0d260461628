// Packed experts on the CPU: rows gathered by expert; the first products of all experts, each over all of its rows, so
// that its weights are read once; the second ones; and a weighted sum over a token's rows. The threads share the
// products of all experts as one list of tasks (cpu/linear/jobs.h).
#include <deque>
#include <vector>

#include "api/packed_experts.h"
#include "common/tensor.h"
#include "cpu/activation/activation.h"
#include "cpu/linear/products.h"
#include "cpu/moe/moe.h"
#include "cpu/thread_pool.h"

namespace radix {
namespace {

constexpr int64_t kGrainElements = 16 * 1024;

// Contiguous [rows, columns] in the workspace.
class Matrix {
 public:
  Matrix(const rk_tensor& like, char* data, int64_t rows, int64_t columns)
      : tensor_(like), shape_{rows, columns}, strides_{columns, 1} {
    tensor_.data = data;
    tensor_.byte_offset = 0;
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

// Row `row` of a contiguous matrix.
class Row {
 public:
  Row(const rk_tensor& matrix, int64_t row) : tensor_(matrix), count_(matrix.shape[1]) {
    tensor_.data = data_ptr<char>(matrix) + row * count_ * element_size(matrix);
    tensor_.byte_offset = 0;
    tensor_.ndim = 1;
    tensor_.shape = &count_;
    tensor_.strides = &step_;
  }
  Row(const Row&) = delete;
  Row& operator=(const Row&) = delete;
  operator const rk_tensor*() const { return &tensor_; }

 private:
  rk_tensor tensor_;
  int64_t count_, step_ = 1;
};

// Products of some rows each, which run together.
class ExpertProducts {
 public:
  explicit ExpertProducts(size_t most) : products_(most) {}

  // Rows `x` [count, k] by a weight -> `out` [count, columns], both of the type of `like`. args: the weight, gate.
  void add(rk_linear_args args, const rk_tensor& like, char* x, char* out, int64_t count, int64_t columns) {
    args.x = matrices_.emplace_back(like, x, count, args.desc->k);
    args.out = matrices_.emplace_back(like, out, count, columns);
    products_.add(args);
  }

  // An expert's row of biases, or NULL.
  const rk_tensor* bias(const rk_tensor* biases, int64_t expert) {
    return biases ? static_cast<const rk_tensor*>(rows_.emplace_back(*biases, expert)) : nullptr;
  }

  void run() const { products_.run(); }

 private:
  std::deque<Matrix> matrices_;
  std::deque<Row> rows_;
  cpu::Products products_;
};

class Experts {
 public:
  Experts(const rk_fused_experts_packed_args& args, const PackedExpertsPlan& plan, char* memory)
      : a_(args), p_(plan), memory_(memory), places_(reinterpret_cast<int32_t*>(memory + plan.places)) {}

  void run() {
    sort_by_expert();
    gather();
    gate_and_up();
    down();
    sum();
  }

 private:
  char* row(int64_t place) const { return memory_ + p_.rows + place * p_.hidden * p_.item; }

  int32_t local(int32_t id) const {
    if (a_.expert_map) {
      if (id < 0 || id >= a_.expert_map->shape[0]) return -1;
      id = data_ptr<int32_t>(*a_.expert_map)[id];
    }
    return id >= 0 && id < a_.num_experts ? id : -1;
  }

  // places_: where a pair's row stands among the rows sorted by expert; -1: it adds nothing.
  void sort_by_expert() {
    const int32_t* ids = data_ptr<int32_t>(*a_.topk_ids);
    const int64_t pairs = p_.tokens * p_.topk;
    begin_.assign(static_cast<size_t>(a_.num_experts) + 1, 0);
    for (int64_t i = 0; i < pairs; i++)
      if (const int32_t e = local(ids[i]); e >= 0) begin_[e + 1]++;
    for (int e = 0; e < a_.num_experts; e++) begin_[e + 1] += begin_[e];
    std::vector<int32_t> next(begin_.begin(), begin_.end() - 1);
    for (int64_t i = 0; i < pairs; i++) {
      const int32_t e = local(ids[i]);
      places_[i] = e >= 0 ? next[e]++ : -1;
    }
  }

  void gather() const {
    const Rows x(*a_.hidden_states);
    cpu::parallel_for(p_.tokens, 1 + kGrainElements / (p_.topk * p_.hidden), [&](int64_t begin, int64_t end) noexcept {
      for (int64_t i = begin * p_.topk; i < end * p_.topk; i++)
        if (places_[i] >= 0) std::memcpy(row(places_[i]), x.at<char>(i / p_.topk), p_.hidden * p_.item);
    });
  }

  // Calls fn(number of an expert, its first row, its rows) for each expert that has rows.
  template <class Fn>
  void for_experts(const Fn& fn) const {
    for (int e = 0; e < a_.num_experts; e++)
      if (begin_[e] < begin_[e + 1]) fn(e, begin_[e], begin_[e + 1] - begin_[e]);
  }
  char* gated(int64_t place) const { return memory_ + p_.gated + place * p_.inner * p_.item; }

  // The activation of gate and up of all rows.
  void gate_and_up() const {
    const rk_tensor& like = *a_.hidden_states;
    const int64_t columns = p_.fused ? p_.inner : 2 * p_.inner;
    char* const to = memory_ + (p_.fused ? p_.gated : p_.gate_up);
    ExpertProducts products(a_.num_experts);
    for_experts([&](int e, int64_t first, int64_t count) {
      rk_linear_args args{sizeof args, a_.experts[e].w1_desc};
      args.packed = a_.experts[e].w1;
      args.bias = products.bias(a_.bias1, e);
      if (p_.fused) {
        args.gate = RK_GATE_HALVES;
        args.gating = a_.gating;
      }
      products.add(args, like, row(first), to + first * columns * p_.item, count, columns);
    });
    products.run();
    if (p_.fused || begin_.back() == 0) return;
    const Matrix both(like, to, begin_.back(), columns), out(like, gated(0), begin_.back(), p_.inner);
    cpu::run_gated({sizeof(rk_gated_activation_args), both, out}, a_.gating);
  }

  // All rows become the results of their experts.
  void down() const {
    ExpertProducts products(a_.num_experts);
    for_experts([&](int e, int64_t first, int64_t count) {
      rk_linear_args args{sizeof args, a_.experts[e].w2_desc};
      args.packed = a_.experts[e].w2;
      args.bias = products.bias(a_.bias2, e);
      products.add(args, *a_.hidden_states, gated(first), row(first), count, p_.hidden);
    });
    products.run();
  }

  void sum() const {
    const rk_tensor& out = *a_.out;
    const int64_t row_bytes = p_.hidden * p_.item;
    cpu::SumTask task{memory_ + p_.rows, data_ptr<char>(out), 0, row_bytes, out.strides[0] * p_.item, p_.topk,
                      p_.hidden,         dtype_of(out)};
    task.weights = data_ptr<float>(*a_.topk_weights);
    task.places = places_;
    const auto kernel = cpu::moe_kernels().sum;
    cpu::parallel_for(p_.tokens, 1 + kGrainElements / (p_.topk * p_.hidden),
                      [&](int64_t begin, int64_t end) noexcept { kernel(task, begin, end); });
  }

  const rk_fused_experts_packed_args& a_;
  const PackedExpertsPlan& p_;
  char* const memory_;
  int32_t* const places_;
  std::vector<int32_t> begin_;  // first sorted row of each expert
};

}  // namespace

void backend::fused_experts_packed(const rk_fused_experts_packed_args& args, const PackedExpertsPlan& plan,
                                   char* memory) {
  if (plan.topk > 0) return Experts(args, plan, memory).run();
  const Rows out(*args.out);
  for (int64_t t = 0; t < plan.tokens; t++) std::memset(out.at<char>(t), 0, plan.hidden * plan.item);
}

}  // namespace radix
