// Storing and gathering latent tokens and joining full keys for MLA on the GPU. Bound by bytes.
#include "api/mla_kv.h"
#include "common/tensor.h"
#include "gpu/device/fp8.h"
#include "gpu/device/launch.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = 256;
constexpr int kLatent = 512, kRope = 64, kGroup = 128;  // of an FP8 token
constexpr int kScaleAt = kLatent, kRopeAt = kLatent + 16;

// Two parts that become one row; strides in bytes, lengths in words of the access width.
struct Join {
  const char *first, *second;
  char* to;
  int64_t first_token, first_head, second_token, to_outer, to_inner;
  int64_t first_words, words;

  bool aligned(uintptr_t bytes, int64_t first_bytes, int64_t row_bytes) const {
    const auto addresses =
        reinterpret_cast<uintptr_t>(first) | reinterpret_cast<uintptr_t>(second) | reinterpret_cast<uintptr_t>(to);
    const auto steps =
        static_cast<uintptr_t>(first_token | first_head | second_token | to_outer | to_inner | first_bytes | row_bytes);
    return (addresses | steps) % bytes == 0;
  }
};

struct alignas(16) Wide {
  uint32_t word[4];
};

template <class Word>
__device__ inline void copy_word(const char* first, const char* second, char* to, int64_t first_words, int64_t word) {
  const auto* from = word < first_words ? reinterpret_cast<const Word*>(first) + word
                                        : reinterpret_cast<const Word*>(second) + (word - first_words);
  reinterpret_cast<Word*>(to)[word] = *from;
}

// Rows of the cache: a thread a word.
template <class Word>
__global__ void __launch_bounds__(kThreads) store_latent_kernel(Join j, const int64_t* slots, int64_t slots_step,
                                                                int64_t tokens, int64_t page_size, int64_t num_slots) {
  wait_for_previous();
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < tokens * j.words; i += step) {
    const int64_t token = quotient(i, j.words), slot = slots[token * slots_step];
    if (slot < 0 || slot >= num_slots) continue;
    copy_word<Word>(j.first + token * j.first_token, j.second + token * j.second_token,
                    j.to + quotient(slot, page_size) * j.to_outer + remainder(slot, page_size) * j.to_inner,
                    j.first_words, remainder(i, j.words));
  }
}

// FP8 tokens: a thread for 8 latent values, 16 neighbours for a scale, 64 for a token.
__global__ void __launch_bounds__(kThreads)
    store_latent_fp8_kernel(Join j, const int64_t* slots, int64_t slots_step, int64_t tokens, int64_t page_size,
                            int64_t num_slots) {
  constexpr int kPerToken = kLatent / 8, kLanes = kGroup / 8;
  wait_for_previous();
  const int piece = threadIdx.x % kPerToken;
  // Whole blocks go round together: the shuffles need every lane.
  for (int64_t first = int64_t{blockIdx.x} * (kThreads / kPerToken); first < tokens;
       first += int64_t{gridDim.x} * (kThreads / kPerToken)) {
    const int64_t token = first + threadIdx.x / kPerToken;
    const int64_t slot = token < tokens ? slots[token * slots_step] : -1;
    const bool stored = slot >= 0 && slot < num_slots;
    float v[8] = {}, largest = 0;
    if (stored) {
      const auto pack = load_pack<8>(reinterpret_cast<const bf16*>(j.first + token * j.first_token) + piece * 8);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        v[i] = to_float(pack.at[i]);
        largest = fmaxf(largest, fabsf(v[i]));
      }
    }
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask /= 2) largest = fmaxf(largest, shuffle_xor(largest, mask));
    if (!stored) continue;
    const float scale = fmaxf(largest, 1e-10f) / e4m3::kLargest;
#pragma unroll
    for (int i = 0; i < 8; i++) v[i] = v[i] / scale;
    char* to = j.to + quotient(slot, page_size) * j.to_outer + remainder(slot, page_size) * j.to_inner;
    store_pack<8>(reinterpret_cast<uint8_t*>(to) + piece * 8, to_fp8<e4m3>(v));
    if (piece % kLanes == 0) reinterpret_cast<float*>(to + kScaleAt)[piece / kLanes] = scale;
    if (piece < kRope / 8)
      reinterpret_cast<Wide*>(to + kRopeAt)[piece] =
          reinterpret_cast<const Wide*>(j.second + token * j.second_token)[piece];
  }
}

// A token of the cache, or that there is none. On AMD its offset: of a pointer that may be NULL the compiler does not
// know that it is to global memory.
#if defined(__HIP__)
using Place = int64_t;
constexpr Place kNowhere = -1;
#else
using Place = const char*;
constexpr Place kNowhere = nullptr;
#endif

// Cached tokens and where they go; strides in bytes.
struct Gather {
  const char* cache;
  char* out;
  const int32_t *table, *cu, *starts;
  int64_t page_bytes, slot_bytes, out_row, table_row, page_size, pages, max_pages, batch, tokens;

  // The token that becomes token `t` of out.
  __device__ Place token(int64_t t) const {
    int64_t low = 0, high = batch - 1;  // the last row that begins at or before t
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      cu[middle] <= t ? low = middle : high = middle - 1;
    }
    const int64_t position = (starts ? starts[low] : 0) + t - cu[low];
    if (t >= cu[batch] || position < 0 || position >= max_pages * page_size) return kNowhere;
    const int64_t page = table[low * table_row + quotient(position, page_size)];
    if (page < 0 || page >= pages) return kNowhere;
#if defined(__HIP__)
    return page * page_bytes + remainder(position, page_size) * slot_bytes;
#else
    return cache + page * page_bytes + remainder(position, page_size) * slot_bytes;
#endif
  }
  __device__ const char* address(Place place) const {
#if defined(__HIP__)
    return cache + place;
#else
    return place;
#endif
  }
};

// A thread a word.
template <class Word>
__global__ void __launch_bounds__(kThreads) gather_latent_kernel(Gather g, int64_t words) {
  wait_for_previous();
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < g.tokens * words; i += step) {
    const int64_t t = quotient(i, words), word = remainder(i, words);
    const Place place = g.token(t);
    const auto* from = reinterpret_cast<const Word*>(g.address(place));
    Word* const to = reinterpret_cast<Word*>(g.out + t * g.out_row) + word;
    // Two stores: a value that is chosen first would go through memory on AMD.
    if (place != kNowhere)
      *to = from[word];
    else
      *to = Word{};
  }
}

// FP8 tokens: a thread for 8 values.
__global__ void __launch_bounds__(kThreads) gather_latent_fp8_kernel(Gather g) {
  constexpr int kPerToken = (kLatent + kRope) / 8;
  wait_for_previous();
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < g.tokens * kPerToken; i += step) {
    const int64_t t = i / kPerToken;
    const int piece = static_cast<int>(i % kPerToken);
    const Place place = g.token(t);
    const char* token = g.address(place);
    auto* to = reinterpret_cast<bf16*>(g.out + t * g.out_row) + piece * 8;
    Pack<bf16, 8> values = {};
    if (place != kNowhere && piece >= kLatent / 8) {
      values = load_pack<8>(reinterpret_cast<const bf16*>(token + kRopeAt) + piece * 8 - kLatent);
    } else if (place != kNowhere) {
      const auto codes = load_pack<8>(reinterpret_cast<const uint8_t*>(token) + piece * 8);
      const float scale = reinterpret_cast<const float*>(token + kScaleAt)[piece / (kGroup / 8)];
#pragma unroll
      for (int n = 0; n < 8; n++) from_float(from_e4m3(codes.at[n]) * scale, values.at[n]);
    }
    store_pack<8>(to, values);
  }
}

// Full keys: a thread a word.
template <class Word>
__global__ void __launch_bounds__(kThreads) concat_key_kernel(Join j, int64_t tokens, int64_t heads) {
  wait_for_previous();
  const int64_t step = int64_t{gridDim.x} * kThreads, total = tokens * heads * j.words;
  for (int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x; i < total; i += step) {
    const int64_t row = quotient(i, j.words), token = quotient(row, heads), head = remainder(row, heads);
    copy_word<Word>(j.first + token * j.first_token + head * j.first_head, j.second + token * j.second_token,
                    j.to + token * j.to_outer + head * j.to_inner, j.first_words, remainder(i, j.words));
  }
}

}  // namespace

namespace backend {

void store_mla_kv(const rk_store_mla_kv_args& a, rk_stream stream) {
  const int64_t tokens = a.latent->shape[0], page_size = a.kv_cache->shape[1];
  if (tokens == 0) return;
  const int64_t num_slots = a.kv_cache->shape[0] * page_size;
  const int64_t from = element_size(*a.latent), item = element_size(*a.kv_cache);
  const int64_t latent_bytes = a.latent->shape[1] * from, bytes = latent_bytes + a.rope->shape[1] * from;
  Join j = {data_ptr<char>(*a.latent),
            data_ptr<char>(*a.rope),
            data_ptr<char>(*a.kv_cache),
            a.latent->strides[0] * from,
            0,
            a.rope->strides[0] * from,
            a.kv_cache->strides[0] * item,
            a.kv_cache->strides[1] * item,
            0,
            0};
  const auto* slots = static_cast<const int64_t*>(data_ptr<int64_t>(*a.slot_mapping));
  const auto run = [&](auto* kernel, int64_t threads_per_token) {
    launch_dependent("store_mla_kv", a.latent->device, stream, kernel, blocks_for(tokens * threads_per_token, kThreads),
                     kThreads, j, slots, a.slot_mapping->strides[0], tokens, page_size, num_slots);
  };
  if (item == 1) return run(store_latent_fp8_kernel, kLatent / 8);
  const int word = j.aligned(16, latent_bytes, bytes) ? 16 : 2;
  j.first_words = latent_bytes / word, j.words = bytes / word;
  run(word == 16 ? store_latent_kernel<Wide> : store_latent_kernel<uint16_t>, j.words);
}

void gather_mla_kv(const rk_gather_mla_kv_args& a, rk_stream stream) {
  const int64_t item = element_size(*a.kv_cache), out_item = element_size(*a.out), bytes = a.kv_cache->shape[2] * item;
  const Gather g = {data_ptr<char>(*a.kv_cache),
                    data_ptr<char>(*a.out),
                    data_ptr<const int32_t>(*a.page_table),
                    data_ptr<const int32_t>(*a.cu_seqlens),
                    a.starts ? data_ptr<const int32_t>(*a.starts) : nullptr,
                    a.kv_cache->strides[0] * item,
                    a.kv_cache->strides[1] * item,
                    a.out->strides[0] * out_item,
                    a.page_table->strides[0],
                    a.kv_cache->shape[1],
                    a.kv_cache->shape[0],
                    a.page_table->shape[1],
                    a.page_table->shape[0],
                    a.out->shape[0]};
  if (g.tokens * bytes == 0) return;
  const auto run = [&](auto* kernel, int64_t threads, auto... more) {
    launch_dependent("gather_mla_kv", a.kv_cache->device, stream, kernel, blocks_for(threads, kThreads), kThreads, g,
                     more...);
  };
  if (item == 1) return run(gather_latent_fp8_kernel, g.tokens * (kLatent + kRope) / 8);
  const auto addresses = reinterpret_cast<uintptr_t>(g.cache) | reinterpret_cast<uintptr_t>(g.out);
  const auto steps = static_cast<uintptr_t>(g.page_bytes | g.slot_bytes | g.out_row | bytes);
  const int64_t word = (addresses | steps) % 16 == 0 ? 16 : 2;
  run(word == 16 ? gather_latent_kernel<Wide> : gather_latent_kernel<uint16_t>, g.tokens * bytes / word, bytes / word);
}

void concat_mla_k(const rk_concat_mla_k_args& a, rk_stream stream) {
  const int64_t tokens = a.k->shape[0], heads = a.k->shape[1];
  const int64_t item = element_size(*a.k), nope_bytes = a.k_nope->shape[2] * item, bytes = a.k->shape[2] * item;
  if (tokens * heads * bytes == 0) return;
  Join j = {data_ptr<char>(*a.k_nope),
            data_ptr<char>(*a.k_rope),
            data_ptr<char>(*a.k),
            a.k_nope->strides[0] * item,
            a.k_nope->strides[1] * item,
            a.k_rope->strides[0] * item,
            a.k->strides[0] * item,
            a.k->strides[1] * item,
            0,
            0};
  const int word = j.aligned(16, nope_bytes, bytes) ? 16 : 2;
  j.first_words = nope_bytes / word, j.words = bytes / word;
  launch_dependent("concat_mla_k", a.k->device, stream,
                   word == 16 ? concat_key_kernel<Wide> : concat_key_kernel<uint16_t>,
                   blocks_for(tokens * heads * j.words, kThreads), kThreads, j, tokens, heads);
}

}  // namespace backend
}  // namespace radix
