// Joining two partial attentions of one query by their log-sum-exps. Bound by bytes.
#include "api/merge_state.h"
#include "common/tensor.h"
#include "gpu/device/element.h"
#include "gpu/device/launch.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = 256;

// The lanes of a row: a warp, and of AMD's warps of 64 lanes a quarter where these move 16 bytes each: 128 dimensions
// are no more.
#if defined(__HIP__)
template <int N>
constexpr int kRowLanes = N > 1 ? 16 : RK_WARP;
#else
template <int N>
constexpr int kRowLanes = RK_WARP;
#endif

// A [tokens, heads, ..] tensor.
template <class T>
struct HeadRows {
  T* data;
  int64_t token, head;

  explicit HeadRows(const rk_tensor& t) : data(data_ptr<T>(t)), token(t.strides[0]), head(t.strides[1]) {}
  __device__ T* at(int64_t t, int64_t h) const { return data + t * token + h * head; }
  // Can every row be moved in packs?
  bool packable(int64_t dim) const {
    constexpr int64_t n = kPackSize<T>;
    return dim % n == 0 && token % n == 0 && head % n == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  }
};

// out and lse may be side a's: a lane reads what it will write.
template <int N, class T>
__global__ void __launch_bounds__(kThreads)
    merge_state_kernel(HeadRows<T> out_a, HeadRows<float> lse_a, HeadRows<T> out_b, HeadRows<float> lse_b,
                       HeadRows<T> out, HeadRows<float> lse, int64_t rows, int64_t heads, int64_t dim) {
  wait_for_previous();
  constexpr int kLanes = kRowLanes<N>, kRows = kThreads / kLanes;
  const int lane = threadIdx.x % kLanes;
  for (int64_t row = int64_t{blockIdx.x} * kRows + threadIdx.x / kLanes; row < rows;
       row += int64_t{gridDim.x} * kRows) {
    const int64_t t = quotient(row, heads), h = remainder(row, heads);
    const float la = *lse_a.at(t, h), lb = *lse_b.at(t, h);
    const float top = la > lb || la != la ? la : lb;  // NaN where either is
    const bool none = top == -INFINITY;
    const float wa = none ? 0.f : exponential(la - top), wb = none ? 0.f : exponential(lb - top),
                sum = none ? 1.f : wa + wb;
#if defined(__HIP__)
    const float inverse = 1.f / sum;
#endif
    for (int64_t i = lane * N; i < dim; i += kLanes * N) {
      const auto a = load_pack<N>(out_a.at(t, h) + i), b = load_pack<N>(out_b.at(t, h) + i);
      Pack<T, N> result;
#pragma unroll
      for (int k = 0; k < N; k++) {
        // A side that saw nothing may hold anything, NaN included.
        const float xa = wa > 0 ? wa * to_float(a.at[k]) : 0.f, xb = wb > 0 ? wb * to_float(b.at[k]) : 0.f;
#if defined(__HIP__)
        from_float((xa + xb) * inverse, result.at[k]);  // a division takes ten instructions
#else
        from_float((xa + xb) / sum, result.at[k]);
#endif
      }
      store_pack<N>(out.at(t, h) + i, result);
    }
    sync_warp();  // all lanes have read the sums
    if (lane == 0) *lse.at(t, h) = none ? top : top + logf(sum);
  }
}

}  // namespace

namespace backend {

void merge_state(const rk_merge_state_args& args, rk_stream stream) {
  const int64_t heads = args.out_a->shape[1], dim = args.out_a->shape[2], rows = args.out_a->shape[0] * heads;
  const HeadRows<float> lse_a(*args.lse_a), lse_b(*args.lse_b), lse(*args.lse);
  dispatch_float(dtype_of(*args.out_a), [&](auto type) {
    using T = typename decltype(type)::type;
    const HeadRows<T> a(*args.out_a), b(*args.out_b), out(*args.out);
    const bool packs = a.packable(dim) && b.packable(dim) && out.packable(dim);
    const int lanes = packs ? kRowLanes<kPackSize<T>> : kRowLanes<1>;
    launch_dependent("merge_state", args.out_a->device, stream,
                     packs ? merge_state_kernel<kPackSize<T>, T> : merge_state_kernel<1, T>,
                     blocks_for(rows, kThreads / lanes), kThreads, a, lse_a, b, lse_b, out, lse, rows, heads, dim);
  });
}

}  // namespace backend
}  // namespace radix
