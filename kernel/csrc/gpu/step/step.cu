// The tensors of a step, and its accepted tokens, in one short kernel each: bound by the latency of a few loads in a
// row, and by the bytes of the page table where rows are long and many.
#include "api/step.h"

#include <algorithm>

#include "common/step.h"
#include "gpu/device/launch.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = 1024;

struct alignas(16) Wide {
  int32_t page[4];
};

// The entries' rows of the page table, in words of one or four pages.
template <class Word>
__device__ void copy_pages(const StepTensors& step) {
  constexpr int kPages = sizeof(Word) / sizeof(int32_t);
  const int64_t words = step.width / kPages;
  for (int64_t i = blockIdx.x; i < step.num_entries; i += gridDim.x) {
    if (!step.has_row(i)) continue;
    const auto* from = reinterpret_cast<const Word*>(step.row_pages + step.entries[i] * step.row_width);
    auto* to = reinterpret_cast<Word*>(step.page_table + i * step.width);
    for (int64_t w = int64_t{blockIdx.y} * kThreads + threadIdx.x; w < words; w += int64_t{gridDim.y} * kThreads)
      to[w] = from[w];
  }
}

// Lengths are committed while other threads read those of other rows: no commit is a base.
template <class Word>
__global__ void __launch_bounds__(kThreads) fill_kernel(StepTensors step) {
  wait_for_previous();
  const int64_t block = int64_t{blockIdx.y} * gridDim.x + blockIdx.x;
  const int64_t first = block * kThreads + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * gridDim.y * kThreads;
  for (int64_t t = first; t < step.num_tokens; t += threads) step.fill_token(t);
  for (int64_t s = first; s < step.num_samples; s += threads) step.fill_sample(s);
  for (int64_t i = first; i < step.num_entries; i += threads) step.fill_entry(i);
  copy_pages<Word>(step);
}

__global__ void __launch_bounds__(kThreads) accept_kernel(AcceptedTokens step) {
  wait_for_previous();
  const int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i >= step.num_entries || !step.is_valid(i)) return;
  const int32_t growth = step.accept(i);
  if (growth != 0) atomicAdd(step.committed_len + step.grow_rows[i], growth);
}

bool is_wide(const StepTensors& step) {
  const auto addresses = reinterpret_cast<uintptr_t>(step.row_pages) | reinterpret_cast<uintptr_t>(step.page_table);
  return addresses % sizeof(Wide) == 0 && (step.row_width | step.width) % 4 == 0;
}

template <class Word>
void fill(const StepTensors& step, rk_device device, rk_stream stream) {
  const int64_t words = step.width * sizeof(int32_t) / sizeof(Word);
  const unsigned tokens = blocks_for(step.num_tokens, kThreads, kMostBlocks);
  const unsigned entries = blocks_for(step.num_entries, 1, kMostBlocks);
  const unsigned parts = blocks_for(words, 4 * kThreads, 16);
  const dim3 grid(std::max({tokens, entries, 1u}), std::max(parts, 1u));
  launch_dependent("fill_step_tensors", device, stream, fill_kernel<Word>, grid, kThreads, step);
}

}  // namespace

namespace backend {

void fill_step_tensors(const rk_fill_step_tensors_args& args, rk_stream stream) {
  const StepTensors step(args);
  is_wide(step) ? fill<Wide>(step, args.entries->device, stream) : fill<int32_t>(step, args.entries->device, stream);
}

void accept_tokens(const rk_accept_tokens_args& args, rk_stream stream) {
  const AcceptedTokens step(args);
  launch_dependent("accept_tokens", args.ids->device, stream, accept_kernel, blocks_for(step.num_entries, kThreads),
                   kThreads, step);
}

}  // namespace backend
}  // namespace radix
