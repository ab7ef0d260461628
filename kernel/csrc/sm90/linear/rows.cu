// Rows of a packed weight in 16 bits: all of them (a product of many tokens takes that form), or those of an embedding.
// A thread has 16 inputs of a row. Bound by bytes.
#include "sm90/linear/problem.cuh"
#include "sm90/linear/scales.cuh"

namespace radix::linear {
namespace {

constexpr int kThreads = 256;

struct RowsParams {
  Layout layout;
  DType scale_type;
  const char* packed;
  const char* ids;  // or null: all rows in order
  int64_t id_step;  // bytes
  bool wide_ids;
  char* out;
  int64_t out_step;  // elements
  int64_t rows;
  bool aligned;  // rows of `out` begin at multiples of 16 bytes
};

__device__ inline int64_t row_of(const RowsParams& p, int64_t t) {
  if (!p.ids) return t;
  const char* id = p.ids + t * p.id_step;
  return p.wide_ids ? *reinterpret_cast<const int64_t*>(id) : *reinterpret_cast<const int32_t*>(id);
}

// The 16 values of step `step` in tile `tile` of k, two a word.
template <class T, Code kCode>
__device__ inline void widen_row(const RowsParams& p, int64_t row, int64_t tile, int step, uint32_t (&out)[8]) {
  const Layout& l = p.layout;
  const int strip = static_cast<int>(row % kTileRows / kStripRows), in_strip = static_cast<int>(row % kStripRows);
  const int64_t at = l.scale_index(row, (tile * kTileK + step * kStepK) / l.group);
  const float scale = scale_at<kCode>(p.packed + l.scales, p.scale_type, at);
  uint32_t zero = 8;
  if (l.zeros) zero = reinterpret_cast<const uint8_t*>(p.packed + l.zeros)[at];
  const uint32_t zeros[2] = {zero_pair<T>(zero), zero_pair<T>(zero)};
  const auto* words =
      reinterpret_cast<const uint32_t*>(p.packed) + (row / kTileRows * l.k_tiles + tile) * (tile_bytes(kCode) / 4);
  // Steps whose words are read together: of one alone what the other would be is the same again, and unused.
  constexpr int kTogether = kCode == Code::e2m1 ? 2 : 1;
  const int first = step / kTogether * kTogether;
#pragma unroll
  for (int t = 0; t < 4; t++) {
    uint32_t pair[2][kStepWords<kCode>], a[2][4];
#pragma unroll
    for (int i = 0; i < kStepWords<kCode> * 2; i++)
      pair[i / kStepWords<kCode>][i % kStepWords<kCode>] =
          words[step_word(kCode, strip, in_strip % 8 * 4 + t, first + i / kStepWords<kCode> % kTogether) +
                i % kStepWords<kCode>];
    widen_steps<T, kCode>(pair, zeros, a);
    const bool upper = in_strip >= 8, second = step != first;
    const uint32_t low = upper ? a[0][1] : a[0][0], high = upper ? a[0][3] : a[0][2];
    const uint32_t second_low = upper ? a[1][1] : a[1][0], second_high = upper ? a[1][3] : a[1][2];
    out[t] = scaled_pair<T>(second ? second_low : low, scale);
    out[t + 4] = scaled_pair<T>(second ? second_high : high, scale);
  }
}

template <class T, Code kCode>
__global__ void __launch_bounds__(kThreads) rows_kernel(RowsParams p) {
  gpu::wait_for_previous();
  const int64_t steps = p.layout.k_tiles * (kTileK / kStepK);
  const int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x, t = index / steps;
  if (t >= p.rows) return;
  const int64_t piece = index % steps, k = piece * kStepK;
  if (k >= p.layout.k) return;
  const int64_t row = row_of(p, t);
  uint32_t values[8];
  if (row >= 0 && row < p.layout.n) {
    widen_row<T, kCode>(p, row, piece / 4, static_cast<int>(piece % 4), values);
  } else {
#pragma unroll
    for (int i = 0; i < 8; i++) values[i] = ~0u;  // no such row: NaN
  }
  T* to = reinterpret_cast<T*>(p.out) + t * p.out_step + k;
  if (p.aligned && k + kStepK <= p.layout.k) {
    reinterpret_cast<uint4*>(to)[0] = make_uint4(values[0], values[1], values[2], values[3]);
    reinterpret_cast<uint4*>(to)[1] = make_uint4(values[4], values[5], values[6], values[7]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kStepK; i++)
    if (k + i < p.layout.k) to[i].bits = static_cast<uint16_t>(values[i / 2] >> i % 2 * 16);
}

template <class T>
void launch(const RowsParams& p, const rk_embedding_args& args, rk_stream stream) {
  const int64_t threads = p.rows * p.layout.k_tiles * (kTileK / kStepK);
  const auto kernel = p.layout.code == Code::u4     ? rows_kernel<T, Code::u4>
                      : p.layout.code == Code::e2m1 ? rows_kernel<T, Code::e2m1>
                                                    : rows_kernel<T, Code::s8>;
  gpu::launch_dependent("embedding", args.out->device, stream, kernel,
                        dim3(static_cast<unsigned>((threads + kThreads - 1) / kThreads)), dim3(kThreads), p);
}

}  // namespace

void widen_rows(const Layout& layout, const rk_embedding_args& args, rk_stream stream) {
  const rk_tensor& out = *args.out;
  RowsParams p{layout, dtype_of(args.desc->scale_dtype), data_ptr<char>(*args.packed)};
  if (args.ids) {
    p.ids = data_ptr<char>(*args.ids);
    p.wide_ids = args.ids->dtype.bits == 64;
    p.id_step = args.ids->strides[0] * element_size(*args.ids);
  }
  p.out = data_ptr<char>(out);
  p.out_step = out.strides[0];
  p.rows = out.shape[0];
  p.aligned = reinterpret_cast<uintptr_t>(p.out) % 16 == 0 && p.out_step % 8 == 0;
  dtype_of(out) == DType::bf16 ? launch<bf16>(p, args, stream) : launch<f16>(p, args, stream);
}

}  // namespace radix::linear
