// Storing K and V into the paged cache on the GPU, a block a token. Bound by bytes: whole elements are moved.
#include "api/kv_cache.h"
#include "common/tensor.h"
#include "gpu/launch.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = 128;

// Rows [T, H, D] and their cache [pages, page_size, H, D], in words of the access width.
struct Store {
  const char* rows;
  char* cache;
  int64_t row_token, row_head, page, slot, cache_head;  // bytes
  int64_t heads, words;                                 // words of one head
};

Store make_store(const rk_tensor& rows, const rk_tensor& cache, int64_t word) {
  const int64_t item = element_size(rows);
  return {data_ptr<char>(rows),    data_ptr<char>(cache),   rows.strides[0] * item,
          rows.strides[1] * item,  cache.strides[0] * item, cache.strides[1] * item,
          cache.strides[2] * item, rows.shape[1],           rows.shape[2] * item / word};
}

bool aligned(const Store& s, int64_t head_bytes, uintptr_t bytes) {
  const auto addresses = reinterpret_cast<uintptr_t>(s.rows) | reinterpret_cast<uintptr_t>(s.cache);
  const auto steps = static_cast<uintptr_t>(s.row_token | s.row_head | s.page | s.slot | s.cache_head | head_bytes);
  return (addresses | steps) % bytes == 0;
}

template <class Word>
__device__ void move(const Store& s, int64_t token, int64_t page, int64_t slot) {
  for (int64_t i = threadIdx.x; i < s.heads * s.words; i += kThreads) {
    const int64_t head = i / s.words, word = i % s.words;
    const auto* from = reinterpret_cast<const Word*>(s.rows + token * s.row_token + head * s.row_head);
    auto* to = reinterpret_cast<Word*>(s.cache + page * s.page + slot * s.slot + head * s.cache_head);
    to[word] = from[word];
  }
}

template <class Word>
__global__ void __launch_bounds__(kThreads) store_kernel(Store k, Store v, const int64_t* slots, int64_t slots_stride,
                                                         int64_t tokens, int64_t page_size, int64_t num_slots) {
  for (int64_t t = blockIdx.x; t < tokens; t += gridDim.x) {
    const int64_t slot = slots[t * slots_stride];
    if (slot < 0 || slot >= num_slots) continue;
    move<Word>(k, t, slot / page_size, slot % page_size);
    move<Word>(v, t, slot / page_size, slot % page_size);
  }
}

struct alignas(16) Wide {
  uint32_t word[4];
};

template <class Word>
void run(const rk_store_kv_cache_args& args, rk_stream stream) {
  const int64_t tokens = args.k->shape[0], page_size = args.k_cache->shape[1];
  launch("store_kv_cache", args.k->device, stream, store_kernel<Word>, blocks_for(tokens, 1), kThreads,
         make_store(*args.k, *args.k_cache, sizeof(Word)), make_store(*args.v, *args.v_cache, sizeof(Word)),
         static_cast<const int64_t*>(data_ptr<int64_t>(*args.slot_mapping)), args.slot_mapping->strides[0], tokens,
         page_size, args.k_cache->shape[0] * page_size);
}

}  // namespace

namespace backend {

void store_kv_cache(const rk_store_kv_cache_args& args, rk_stream stream) {
  if (args.k->shape[0] == 0) return;
  const int64_t item = element_size(*args.k);
  const bool wide = aligned(make_store(*args.k, *args.k_cache, item), args.k->shape[2] * item, 16) &&
                    aligned(make_store(*args.v, *args.v_cache, item), args.v->shape[2] * item, 16);
  if (wide) return run<Wide>(args, stream);
  if (item == 4) return run<uint32_t>(args, stream);
  run<uint16_t>(args, stream);
}

}  // namespace backend
}  // namespace radix
