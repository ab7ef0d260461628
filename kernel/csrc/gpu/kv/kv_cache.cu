// Storing K and V into the paged cache on the GPU, a block a token: bits are copied, or values quantized to FP8. Bound
// by bytes.
#include "api/kv_cache.h"
#include "common/tensor.h"
#include "gpu/device/fp8.h"
#include "gpu/device/launch.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = 128;

// Rows [T, H, D] and their cache [pages, page_size, H, D], moved in pieces of so many elements.
struct Heads {
  const char* rows;
  char* cache;
  int64_t row_token, row_head, page, slot, cache_head;  // bytes
  int64_t heads, pieces;                                // pieces of one head

  Heads(const rk_tensor& r, const rk_tensor& c, int64_t elements)
      : rows(data_ptr<char>(r)), cache(data_ptr<char>(c)), heads(r.shape[1]), pieces(r.shape[2] / elements) {
    const int64_t from = element_size(r), to = element_size(c);
    row_token = r.strides[0] * from;
    row_head = r.strides[1] * from;
    page = c.strides[0] * to;
    slot = c.strides[1] * to;
    cache_head = c.strides[2] * to;
  }
  bool aligned(uintptr_t from, uintptr_t to) const {
    const auto row_steps = reinterpret_cast<uintptr_t>(rows) | static_cast<uintptr_t>(row_token | row_head);
    const auto cache_steps = reinterpret_cast<uintptr_t>(cache) | static_cast<uintptr_t>(page | slot | cache_head);
    return row_steps % from == 0 && cache_steps % to == 0;
  }
  // Calls move(from, to, head, piece) for every piece of a token.
  template <class Move>
  __device__ void each(int64_t token, int64_t to_page, int64_t to_slot, const Move& move) const {
    for (int64_t i = threadIdx.x; i < heads * pieces; i += kThreads) {
      const int64_t head = quotient(i, pieces);
      move(rows + token * row_token + head * row_head, cache + to_page * page + to_slot * slot + head * cache_head,
           head, remainder(i, pieces));
    }
  }
};

template <class Word>
struct Copied {
  Heads of;
  __device__ void store(int64_t token, int64_t page, int64_t slot) const {
    of.each(token, page, slot, [](const char* from, char* to, int64_t, int64_t piece) {
      reinterpret_cast<Word*>(to)[piece] = reinterpret_cast<const Word*>(from)[piece];
    });
  }
};

// N elements of T at a time; scale: of all heads (step 0) or of each.
template <class T, int N>
struct Quantized {
  Heads of;
  const float* scale;
  int64_t scale_step;
  __device__ void store(int64_t token, int64_t page, int64_t slot) const {
    of.each(token, page, slot, [&](const char* from, char* to, int64_t head, int64_t piece) {
      float v[N];
      widen_pack(load_pack<N>(reinterpret_cast<const T*>(from) + piece * N), v);
      divide(v, scale[head * scale_step]);
      auto* out = reinterpret_cast<uint8_t*>(to) + piece * N;
      if constexpr (N > 1) {
        store_pack<N>(out, to_fp8<NativeE4m3>(v));
      } else {
        *out = to_fp8<NativeE4m3>(v[0]);
      }
    });
  }
};

template <class Side>
__global__ void __launch_bounds__(kThreads) store_kernel(Side k, Side v, const int64_t* slots, int64_t slots_stride,
                                                         int64_t tokens, int64_t page_size, int64_t num_slots) {
  wait_for_previous();
  for (int64_t t = blockIdx.x; t < tokens; t += gridDim.x) {
    const int64_t slot = slots[t * slots_stride];
    if (slot < 0 || slot >= num_slots) continue;
    k.store(t, quotient(slot, page_size), remainder(slot, page_size));
    v.store(t, quotient(slot, page_size), remainder(slot, page_size));
  }
}

struct alignas(16) Wide {
  uint32_t word[4];
};

template <class Side>
void run(const rk_store_kv_cache_args& args, const Side& k, const Side& v, rk_stream stream) {
  const int64_t tokens = args.k->shape[0], page_size = args.k_cache->shape[1];
  launch_dependent("store_kv_cache", args.k->device, stream, store_kernel<Side>, blocks_for(tokens, 1), kThreads, k, v,
                   static_cast<const int64_t*>(data_ptr<int64_t>(*args.slot_mapping)), args.slot_mapping->strides[0],
                   tokens, page_size, args.k_cache->shape[0] * page_size);
}

template <class Word>
void copy(const rk_store_kv_cache_args& args, rk_stream stream) {
  const int64_t elements = sizeof(Word) / element_size(*args.k);
  run(args, Copied<Word>{Heads(*args.k, *args.k_cache, elements)},
      Copied<Word>{Heads(*args.v, *args.v_cache, elements)}, stream);
}

template <class T, int N>
void quantize(const rk_store_kv_cache_args& args, rk_stream stream) {
  const auto side = [](const rk_tensor& rows, const rk_tensor& cache, const rk_tensor& scale) {
    return Quantized<T, N>{Heads(rows, cache, N), data_ptr<float>(scale), scale.shape[0] > 1 ? scale.strides[0] : 0};
  };
  run(args, side(*args.k, *args.k_cache, *args.k_scale), side(*args.v, *args.v_cache, *args.v_scale), stream);
}

// Whether both sides can be moved N elements at a time.
bool in_pieces_of(const rk_store_kv_cache_args& args, int64_t n) {
  const auto whole = [&](const rk_tensor& rows, const rk_tensor& cache) {
    return rows.shape[2] % n == 0 && Heads(rows, cache, n)
                                         .aligned(static_cast<uintptr_t>(n * element_size(rows)),
                                                  static_cast<uintptr_t>(n * element_size(cache)));
  };
  return whole(*args.k, *args.k_cache) && whole(*args.v, *args.v_cache);
}

}  // namespace

namespace backend {

void store_kv_cache(const rk_store_kv_cache_args& args, rk_stream stream) {
  if (args.k->shape[0] == 0) return;
  const int64_t item = element_size(*args.k);
  const bool wide = in_pieces_of(args, 16 / item);
  if (args.k_scale) {
    require_native_fp8("store_kv_cache", "k_cache", *args.k_cache);
    return dispatch_float(dtype_of(*args.k), [&](auto t) {
      using T = typename decltype(t)::type;
      wide ? quantize<T, kPackSize<T>>(args, stream) : quantize<T, 1>(args, stream);
    });
  }
  if (wide) return copy<Wide>(args, stream);
  if (item == 4) return copy<uint32_t>(args, stream);
  copy<uint16_t>(args, stream);
}

}  // namespace backend
}  // namespace radix
