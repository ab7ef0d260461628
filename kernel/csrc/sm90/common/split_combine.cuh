// The second kernel of decode: joins the nodes of rows that several blocks worked on.
#pragma once

#include "sm90/common/split_state.cuh"

namespace radix::split_kv {

// A thread's part of the tree over one row: complete nodes wait in shared memory for their right siblings.
template <class L>
class NodeStack {
 public:
  __device__ NodeStack(char* shared, int levels)
      : o_(reinterpret_cast<float4*>(shared) + threadIdx.x),
        ml_(reinterpret_cast<float2*>(shared + levels * L::kThreads * sizeof(float4)) + threadIdx.x) {}

  __host__ __device__ static constexpr int bytes(int levels) {
    return levels * L::kThreads * static_cast<int>(sizeof(float4) + sizeof(float2));
  }

  // A node over the chunks [first, first + width), the next ones of the row.
  __device__ void push(Piece node, int first, int width) {
    for (; first & width; width *= 2) {
      node = join(pop(), node);
      first -= width;
    }
    o_[depth_ * L::kThreads] = node.o;
    ml_[depth_ * L::kThreads] = {node.m, node.l};
    depth_++;
  }
  // All of the row, joined from the right.
  __device__ Piece fold() {
    Piece sum = pop();
    while (depth_ > 0) sum = join(pop(), sum);
    return sum;
  }

 private:
  __device__ Piece pop() {
    depth_--;
    const float2 ml = ml_[depth_ * L::kThreads];
    return {o_[depth_ * L::kThreads], ml.x, ml.y};
  }

  float4* o_;
  float2* ml_;
  int depth_ = 0;
};

// Walks over the nodes of a row in the order of its chunks: those of each run [at, end) are its largest aligned powers
// of two, from the left.
template <class L>
class NodeWalk {
 public:
  // from: the row's first chunk in the line; run: that in which the row begins.
  __device__ NodeWalk(const Args& a, const Plan& plan, int kv_head, int from, int count, int run)
      : a_(&a), plan_(&plan), kv_head_(kv_head), from_(from), count_(count), run_(run) {}

  __device__ bool more() const { return at_ < count_; }
  __device__ const char* next(int& first, int& width) {
    while (at_ >= end_) {
      const int64_t block = int64_t{run_} * a_->p.kv_heads + kv_head_;
      const int nodes = nodes_of_block(a_->levels);
      nodes_ = a_->nodes + (block * nodes + (at_ > 0 ? 0 : 2 * a_->levels)) * L::kNodeBytes;
      end_ = min(plan_->start(++run_, a_->groups) - from_, count_);
    }
    const int fits = 1 << (31 - __clz(end_ - at_));
    first = at_;
    width = at_ == 0 ? fits : min(fits, at_ & -at_);
    at_ += width;
    const char* node = nodes_;
    nodes_ += L::kNodeBytes;
    return node;
  }

 private:
  const Args* a_;
  const Plan* plan_;
  const char* nodes_ = nullptr;
  int kv_head_, from_, count_, run_, at_ = 0, end_ = 0;
};

// Nodes that lie side by side, each as wide as the first but for the last, which is any aligned one. The same tree.
template <int kMost>
__device__ inline Piece fold_even(Piece (&nodes)[kMost], int count) {
  static_assert(sm90::is_power_of_two(kMost), "a full binary tree");
#pragma unroll
  for (int step = 1; step < kMost; step *= 2)
#pragma unroll
    for (int n = 0; n + step < kMost; n += 2 * step)
      if (n + step < count) nodes[n] = join(nodes[n], nodes[n + step]);
  return nodes[0];
}

// Block (KV head, piece, border - 1): of the borders between runs that cut a row, the row's first is responsible.
//
// The few blocks that find work ought to be there, with their plan made, when the kernel before ends: they come first,
// and the others leave their places at once.
template <class T, class L>
__global__ void __launch_bounds__(L::kThreads, 2) combine_kernel(const __grid_constant__ Args a) {
  extern __shared__ __align__(128) char shared[];
  static_assert(L::kThreads * 2 <= sm90::kSmThreads, "two blocks a multiprocessor");
  const int kv_head = blockIdx.x, piece = blockIdx.y, border = blockIdx.z + 1;
  sm90::pdl_trigger();
  const Plan plan = make_plan<L::kThreads>(a, L::kRows, reinterpret_cast<int*>(shared));
  const int x = plan.start(border, a.groups);
  int row = 0;
  Chunk c{};
  QueryBlock block{};
  bool needed = x < plan.chunks();
  if (needed) {
    row = plan.row_of(x);
    c = locate(plan, x, row);
    block = query_block(plan, c, a.group, kv_head, L::kRows);
    needed = c.index > 0 && plan.start(border - 1, a.groups) <= x - c.index && live<L>(piece, block.rows);
  }
  if (!needed) {
    // When this grid has ended, the one before must have ended too: one block waits in any case.
    if (kv_head == 0 && piece == 0 && border == 1) sm90::pdl_wait();
    return;
  }

  const NodeWalk<L> begin(a, plan, kv_head, x - c.index, c.count, border - 1);
  constexpr int kMost = 16, kAhead = 8;  // nodes asked for at once
  const char* place[kMost];
  int count = 0, widest = 0;
  bool even = true;
  NodeWalk<L> walk = begin;
#pragma unroll
  for (int n = 0; n < kMost; n++)
    if (walk.more()) {
      int first, width;
      place[n] = walk.next(first, width);
      if (n == 0) widest = width;
      even = even && first == n * widest;
      count = n + 1;
    }
  even = even && !walk.more();
  sm90::pdl_wait();
  if (even) {
    Piece nodes[kMost];
#pragma unroll
    for (int n = 0; n < kMost; n++)
      if (n < count) nodes[n] = L::load(place[n], piece);
    finish_piece<T, L>(a, block, kv_head, piece, fold_even(nodes, count));
    return;
  }

  NodeStack<L> stack(shared + kPlanBytes, a.levels);
  walk = begin;
  while (walk.more()) {
    Piece ahead[kAhead];
    int first[kAhead], width[kAhead], filled = 0;
#pragma unroll
    for (int n = 0; n < kAhead; n++)
      if (walk.more()) {
        ahead[n] = L::load(walk.next(first[n], width[n]), piece);
        filled = n + 1;
      }
#pragma unroll
    for (int n = 0; n < kAhead; n++)
      if (n < filled) stack.push(ahead[n], first[n], width[n]);
  }
  finish_piece<T, L>(a, block, kv_head, piece, stack.fold());
}

// After the kernel whose blocks left nodes of L.
template <class T, class L>
void launch_combine(const char* op, const Args& a, rk_stream stream) {
  if (a.levels == 1 || a.groups == 1) return;
  const gpu::DeviceScope scope(a.p.device);
  // The division of the SM's memory that the other kernel has: to change it, an SM must first run empty.
  gpu::raise_kernel_attribute(op, a.p.device, combine_kernel<T, L>, cudaFuncAttributePreferredSharedMemoryCarveout,
                              cudaSharedmemCarveoutMaxShared);
  const int shared = kPlanBytes + NodeStack<L>::bytes(a.levels);
  sm90::launch_dependent(op, a.p.device, stream, combine_kernel<T, L>,
                         {dim3(a.p.kv_heads, L::kPieces, a.groups - 1), L::kThreads, shared}, a);
}

}  // namespace radix::split_kv
