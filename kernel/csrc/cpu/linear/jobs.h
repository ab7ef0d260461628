// A call's products on the thread pool.
//
//   stage   x -> scratch in the form that the kernel reads, zero beyond k
//   tasks   (chunk of rows) x (group of packed blocks), the blocks innermost: a chunk of x stays in L2 while the
//   weights
//           stream past it; with few rows there is one chunk and every weight is read once
//
// Several products of a call (the experts of a layer) are staged together and make one list of tasks, so that no thread
// waits between them.
#pragma once

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <vector>

#include "cpu/linear/problem.h"
#include "cpu/thread_pool.h"

namespace radix::cpu::RK_ISA {

// Grow-only, 64-byte aligned, in huge pages where the system gives them and it fills some; the calling thread owns it
// until its op returns.
class Scratch {
 public:
  ~Scratch() { std::free(data_); }
  char* get(int64_t bytes) {
    if (bytes > capacity_) {
      std::free(data_);
      constexpr int64_t kHuge = 2 << 20;
      const int64_t page = bytes < kHuge ? 64 : kHuge;
      capacity_ = round_up(bytes, page);
      data_ = std::aligned_alloc(page, capacity_);
      if (!data_) {
        capacity_ = 0;
        fail(RK_RUNTIME, "linear: out of host memory (%lld bytes of scratch)", (long long)bytes);
      }
      if (page == kHuge) madvise(data_, capacity_, MADV_HUGEPAGE);  // advice: it may fail
    }
    return static_cast<char*>(data_);
  }

 private:
  void* data_ = nullptr;
  int64_t capacity_ = 0;
};

// What a thread does behind a task.
struct Ahead {
  bool more;            // it has another task
  const uint8_t* next;  // the packed blocks that it reads behind the last ones of the task's product
};

// One product. Each kernel has its own: how x is staged, and what multiplies it.
class Job {
 public:
  virtual ~Job() = default;
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;

  // Bytes of scratch, a multiple of 64.
  int64_t scratch_bytes() const { return staged_bytes_ + (widens_bias() ? lanes() * int64_t{sizeof(float)} : 0); }
  // Before the rest: where its scratch lies.
  void place(char* scratch) {
    if (widens_bias())
      widen_bias(reinterpret_cast<float*>(scratch + staged_bytes_));
    else if (args_.bias)
      p_.bias = data_ptr<float>(*args_.bias);
    place_x(scratch);
  }
  // Units [begin, end) of x, of units().
  virtual void stage(int64_t begin, int64_t end) const noexcept = 0;
  // `largest`: the maxima of all rows that are kept instead of outputs, or NULL.
  virtual void run(int64_t task, const Ahead& ahead, LaneMaxima* largest) const noexcept = 0;

  const Problem& problem() const { return p_; }
  int64_t units() const { return (p_.m + unit_rows_ - 1) / unit_rows_; }
  int64_t unit_cost() const { return unit_cost_; }
  int64_t tasks() const { return (p_.m + chunk_rows_ - 1) / chunk_rows_ * groups(); }
  // What a task takes, roughly.
  int64_t task_ns() const {
    const int64_t weights = group_ * p_.block_bytes * (p_.gate == RK_GATE_HALVES ? 2 : 1);
    return product_ns(weights, lesser(p_.m, chunk_rows_), group_ * kBlockN, p_.k);
  }

 protected:
  Job(const rk_linear_args& args, RowMaxima* maxima, int64_t block_bytes, int64_t staged_bytes)
      : p_(make_problem(args, maxima, block_bytes)), args_(args), staged_bytes_(round_up(staged_bytes, 64)) {}

  virtual void place_x(char* scratch) = 0;

  // How x is cut to be staged: rows of a unit, and what one costs, in elements.
  void stage_by(int64_t rows, int64_t cost) {
    unit_rows_ = rows;
    unit_cost_ = cost;
  }
  template <class Product>
  void cut_for(const Product& product) {
    chunk_rows_ = product.chunk_rows(p_.m);
    group_ = Product::kBlocks;
  }
  template <class Product>
  void run_product(const Product& product, int64_t task, const Ahead& ahead, LaneMaxima* largest) const noexcept;

  Problem p_;

 private:
  int64_t groups() const { return (p_.blocks + group_ - 1) / group_; }
  int64_t lanes() const { return linear_layout::num_blocks(p_.n) * kBlockN; }

  // A bias in float32 that fills its blocks is read where it lies.
  bool widens_bias() const { return args_.bias && (dtype_of(*args_.bias) != DType::f32 || p_.n != lanes()); }

  void widen_bias(float* bias) {
    std::memset(bias, 0, lanes() * sizeof(float));
    dispatch_float(dtype_of(*args_.bias), [&](auto type) {
      const auto* from = data_ptr<typename decltype(type)::type>(*args_.bias);
      for (int64_t i = 0; i < p_.n; i++) bias[i] = to_float(from[i]);
    });
    p_.bias = bias;
  }

  const rk_linear_args& args_;
  int64_t staged_bytes_, unit_rows_ = 1, unit_cost_ = 1, chunk_rows_ = 1, group_ = 1;
};

// A task of a product whose `tile` gives the sums of up to kRows rows and kBlocks neighbouring packed blocks:
//   tile(first row, rows, packed blocks, number of blocks, float sums [rows][kBlocks][16])
// always summing a row in the same way, whatever the rows and blocks beside it. scope(m) is held around a task's tiles.
// kOnTiles: `tile` also takes the blocks that are read next, or NULL, and the ends (problem.h) to call for each few
// rows: fetch() and begin() before their first sums, finish() when they are complete and still lie in L1. Where
// many(rows) holds tile_many() takes their place: with the blocks of the gates and the up rows together.
template <class Product>
void Job::run_product(const Product& product, int64_t task, const Ahead& ahead, LaneMaxima* largest) const noexcept {
  constexpr int64_t kStride = Product::kBlocks * kBlockN;
  const Problem& p = p_;
  const int64_t m0 = task / groups() * chunk_rows_, m1 = lesser(m0 + chunk_rows_, p.m);
  const int64_t block = task % groups() * group_, count = lesser(group_, p.blocks - block);
  const bool streaming = Product::kOnTiles && streams_outputs(p);
  [[maybe_unused]] const auto scope = product.scope(p.m);
  alignas(64) float sums[2][Product::kRows * kStride];
  const uint8_t* w = p.packed + block * p.block_bytes;
  const uint8_t* up = p.gate == RK_GATE_HALVES ? w + p.blocks * p.block_bytes : nullptr;
  const int blocks = static_cast<int>(count);
  for (int64_t m = m0; m < m1; m += Product::kRows) {
    const int rows = static_cast<int>(lesser(Product::kRows, m1 - m));
    const OutputEnds ends{p, up ? sums[0] : nullptr, kStride, m, block, count, streaming, largest};
    if constexpr (Product::kOnTiles) {
      const uint8_t* behind = block + count < p.blocks ? w + count * p.block_bytes : m1 < p.m ? p.packed : ahead.next;
      const uint8_t* next = ahead.more ? behind : nullptr;
      if (product.many(rows)) {
        product.tile_many(m, rows, {w, up, next, blocks}, sums[0], sums[1], ends);
      } else if (up) {
        product.tile(m, rows, w, blocks, up, sums[0], GateEnds());
        product.tile(m, rows, up, blocks, next, sums[1], ends);
      } else {
        product.tile(m, rows, w, blocks, next, sums[0], ends);
      }
    } else {
      product.tile(m, rows, w, blocks, sums[0]);
      if (up) product.tile(m, rows, up, blocks, sums[1]);
      ends.finish(0, rows, sums[0], sums[1]);
    }
  }
  if (streaming) __builtin_ia32_sfence();  // before others are told that the task is done
}

// The products of a call. A thread takes neighbouring units or tasks, worth about 10 us or more.
class Jobs {
 public:
  explicit Jobs(size_t count) { jobs_.reserve(count); }
  void add(std::unique_ptr<Job> job) { jobs_.push_back(std::move(job)); }

  void run() {
    place();
    stage();
    multiply();
  }

 private:
  static constexpr int64_t kUnitsCost = 1 << 16;  // elements

  void place() {
    static thread_local Scratch scratch;
    int64_t bytes = 0;
    for (const auto& job : jobs_) bytes += job->scratch_bytes();
    char* memory = scratch.get(bytes);
    for (const auto& job : jobs_) {
      job->place(memory);
      memory += job->scratch_bytes();
    }
  }

  // The first number of each job in a list of all of them, and the end.
  template <class Count>
  std::vector<int64_t> first_of(const Count& count) const {
    std::vector<int64_t> first{0};
    first.reserve(jobs_.size() + 1);
    for (const auto& job : jobs_) first.push_back(first.back() + count(*job));
    return first;
  }

  void stage() const {
    const auto first = first_of([](const Job& job) { return job.units(); });
    int64_t cost = 0;
    for (const auto& job : jobs_) cost += job->units() * job->unit_cost();
    const int64_t grain = greater(1, kUnitsCost * first.back() / greater(cost, 1));
    parallel_for(first.back(), grain, [&](int64_t begin, int64_t end) noexcept {
      for (size_t at = job_at(first, begin); begin < end; at++) {
        const int64_t last = lesser(end, first[at + 1]);
        jobs_[at]->stage(begin - first[at], last - first[at]);
        begin = last;
      }
    });
  }

  void multiply() const {
    const auto first = first_of([](const Job& job) { return job.tasks(); });
    int64_t ns = 0;
    for (const auto& job : jobs_) ns += job->tasks() * job->task_ns();
    const int64_t grain = greater(1, kLeastTaskNs * first.back() / greater(ns, 1));
    const Problem& one = jobs_[0]->problem();  // only a call of one product asks for maxima
    run_tasks(first.back(), grain, [&](Tasks& own) noexcept {
      LaneMaxima* largest = one.maxima ? claim(one) : nullptr;
      if (one.maxima && !largest) return;  // to those who have one
      for (int64_t begin, end; own.take(&begin, &end);) {
        size_t at = job_at(first, begin);
        for (int64_t task = begin; task < end; task++) {
          while (task >= first[at + 1]) at++;
          const Ahead ahead{task + 1 < end || own.more(), jobs_[(at + 1) % jobs_.size()]->problem().packed};
          jobs_[at]->run(task - first[at], ahead, largest);
        }
      }
    });
  }

  static size_t job_at(const std::vector<int64_t>& first, int64_t number) {
    return std::upper_bound(first.begin(), first.end(), number) - first.begin() - 1;
  }

  std::vector<std::unique_ptr<Job>> jobs_;
};

}  // namespace radix::cpu::RK_ISA
