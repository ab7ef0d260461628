// All-reduce, residual add, RMSNorm and quantization in one launch: a block takes whole rows through its channel, so
// the row whose sum has arrived stays in shared memory until its norm is written. The bytes over the link are those of
// the all-reduce; what is saved is the other ops' launches and their passes over memory.
#include "api/all_reduce.h"
#include "common/tensor.h"
#include "gpu/comm/all_reduce_plan.h"
#include "gpu/comm/peer.h"
#include "gpu/comm/peer_sum.h"
#include "gpu/device/fp8.h"
#include "gpu/device/launch.h"
#include "gpu/device/reduce.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kThreads = 1024;
constexpr int kMaxRowWords = 2048;  // rows have at most 32 KiB
constexpr int kGroup = 128;         // elements that share a scale, where a row has more than one
constexpr float kLeast = 1e-10f;

template <class T>
struct Norm {
  T* residual;
  const void* weight;
  bool weight_is_float;
  float eps;
  T* out;           // NULL when quantized
  e4m3* quantized;  // NULL otherwise
  float* scale;
  bool grouped;  // a scale for each kGroup elements, not one a row
  int words;     // of a row
};

// What a row's threads find out together: the sum of the squares and the largest product with the weight.
struct RowFacts {
  float squares = 0, largest = 0;
};
// Two floats in the word that a shuffle moves.
__device__ inline uint64_t packed(const RowFacts& facts) {
  return bits_as<uint64_t>(facts);
}
struct Combine {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const {
    const auto x = bits_as<RowFacts>(a), y = bits_as<RowFacts>(b);
    return packed({x.squares + y.squares, fmaxf(x.largest, y.largest)});
  }
};

// What is normalized: the sum over the ranks and the residual, not rounded.
template <class T>
__device__ void add(const Pack<T, 16 / sizeof(T)>& sum, const Pack<T, 16 / sizeof(T)>& residual,
                    float (&values)[16 / sizeof(T)]) {
#pragma unroll
  for (size_t j = 0; j < 16 / sizeof(T); j++) values[j] = to_float(sum.at[j]) + to_float(residual.at[j]);
}

// Multiplies the word's elements by their weights; returns the largest magnitude.
template <class T>
__device__ float weigh(const Norm<T>& norm, int word, float (&values)[16 / sizeof(T)]) {
  constexpr int kSize = 16 / sizeof(T);
  if (norm.weight_is_float) {
    const float* weight = static_cast<const float*>(norm.weight) + word * kSize;
#pragma unroll
    for (int j = 0; j < kSize; j++) values[j] *= weight[j];
  } else {
    const T* weight = static_cast<const T*>(norm.weight) + word * kSize;
#pragma unroll
    for (int j = 0; j < kSize; j++) values[j] *= to_float(weight[j]);
  }
  float largest = 0;
#pragma unroll
  for (int j = 0; j < kSize; j++) largest = fmaxf(largest, fabsf(values[j]));
  return largest;
}

template <class T>
__device__ void store_rounded(T* to, const float (&values)[16 / sizeof(T)], float factor) {
  Pack<T, 16 / sizeof(T)> pack;
#pragma unroll
  for (size_t j = 0; j < 16 / sizeof(T); j++) from_float(values[j] * factor, pack.at[j]);
  store_pack<16 / sizeof(T)>(to, pack);
}

// Writes row `row` and its residual, from the sums over the ranks in `kept`. The residual is read a second time, by the
// thread that writes it: it waits for weights anyway, and float32 sums would take 64 KiB of shared memory. All threads
// of the block call it.
template <class T>
__device__ void write_row(const Norm<T>& norm, int64_t row, const Pack<T, 16 / sizeof(T)>* kept, float factor,
                          float largest) {
  constexpr int kSize = 16 / sizeof(T);
  const int hidden = norm.words * kSize, group = norm.grouped ? kGroup : hidden;
  for (int base = 0; base < norm.words; base += kThreads) {
    const int word = base + threadIdx.x, first = word * kSize;
    float values[kSize] = {}, here = 0;
    if (word < norm.words) {
      T* residual = norm.residual + row * hidden + first;
      add(kept[word], load_pack<kSize>(residual), values);
      store_rounded(residual, values, 1.f);
      here = weigh(norm, word, values);
    }
    if (norm.grouped) {  // a group is of neighbouring lanes; all of a warp take part
#pragma unroll
      for (int mask = kGroup / kSize / 2; mask > 0; mask >>= 1) here = fmaxf(here, shuffle_xor(here, mask));
    }
    if (word >= norm.words) continue;
    if (norm.out) {
      store_rounded(norm.out + row * hidden + first, values, factor);
      continue;
    }
    const float scale = fmaxf((norm.grouped ? here : largest) * factor, kLeast) / e4m3::kLargest;
    Pack<e4m3, kSize> pack;
#pragma unroll
    for (int j = 0; j < kSize; j++) from_float(values[j] * factor / scale, pack.at[j]);
    store_pack<kSize>(norm.quantized + row * hidden + first, pack);
    if (first % group == 0) norm.scale[row * (hidden / group) + first / group] = scale;
  }
}

template <class T, int N, bool kTwoShot>
__global__ void __launch_bounds__(kThreads, 1)
    all_reduce_norm_kernel(PeerView view, Bytes in, Norm<T> norm, int per_block) {
  constexpr int kSize = 16 / sizeof(T);
  __shared__ Pack<T, kSize> kept[kMaxRowWords];  // every thread reads what it has written
  wait_for_previous();
  const Channel<N> channel(view);
  Wait wait(view);
  const Stretch stretch(in, per_block);
  const int share = (per_block + N - 1) / N;
  if (kTwoShot) {
    send_shares<N>(channel, stretch, view.rank, share);
    sum_share<T, N>(channel, stretch, view.rank, share, wait, [&](int place, const Words& sum) {
#pragma unroll
      for (int k = 0; k < N; k++) channel.send(k, N * share + place, sum);
    });
  } else {
    for (int base = threadIdx.x; base < stretch.count; base += kUnderWay<N> * kThreads)
      send_batch<N>(channel, stretch, base, kThreads, view.rank * per_block);
  }
  for (int begin = 0; begin < stretch.count; begin += norm.words) {
    const T* residual = norm.residual + (stretch.first + begin) * kSize;
    RowFacts facts;
    for (int word = threadIdx.x; word < norm.words; word += kThreads) {
      const int place = begin + word;
      const auto before = load_pack<kSize>(residual + word * kSize);  // under way while we wait
      Words sum;
      if (kTwoShot) {
        sum = channel.look(N * share + place);
        channel.settle(N * share + place, place / share, sum, wait);
      } else {
        Words w[N];
        look_all<N>(channel, view.rank, place, per_block, stretch.load(place), w);
        settle_all<N>(channel, view.rank, place, per_block, w, wait);
        sum = sum_of<T, N>(w);
      }
      kept[word] = bits_as<Pack<T, kSize>>(sum);
      float values[kSize];
      add(kept[word], before, values);
#pragma unroll
      for (int j = 0; j < kSize; j++) facts.squares += values[j] * values[j];
      if (norm.quantized && !norm.grouped) facts.largest = fmaxf(facts.largest, weigh(norm, word, values));
    }
    facts = bits_as<RowFacts>(block_reduce<kThreads>(packed(facts), Combine()));
    const float mean = facts.squares / static_cast<float>(norm.words * kSize);
    write_row(norm, quotient(stretch.first + begin, norm.words), kept, 1.f / sqrtf(mean + norm.eps), facts.largest);
  }
  channel.close();
}

template <class T>
Norm<T> norm_of(const rk_all_reduce_add_rmsnorm_args& args, int words) {
  Norm<T> norm{};
  norm.residual = data_ptr<T>(*args.residual);
  norm.weight = data_ptr<char>(*args.weight);
  norm.weight_is_float = dtype_of(*args.weight) == DType::f32;
  norm.eps = args.eps;
  norm.words = words;
  if (args.scale) {
    norm.quantized = data_ptr<e4m3>(*args.out);
    norm.scale = data_ptr<float>(*args.scale);
    norm.grouped = args.scale->shape[args.scale->ndim - 1] > 1;
  } else {
    norm.out = data_ptr<T>(*args.out);
  }
  return norm;
}

}  // namespace

namespace backend {

void all_reduce_add_rmsnorm(const rk_all_reduce_add_rmsnorm_args& args, rk_stream stream) {
  const rk_gpu_comm& comm = *args.comm;
  const rk_tensor& input = *args.input;
  const int64_t hidden = input.shape[input.ndim - 1], row_bytes = hidden * element_size(input);
  int64_t rows = 1;
  for (int i = 0; i < input.ndim - 1; i++) rows *= input.shape[i];
  const int row_words = static_cast<int>(row_bytes / 16), world = comm.world_size();
  const AllReduceNormPlan plan = plan_all_reduce_norm(world, rows, row_words, comm.view().side, args.algorithm);
  if (plan.most_rows < 1)
    fail(RK_INVALID, "all_reduce_add_rmsnorm: rows of %lld bytes do not fit the communicator's max_bytes",
         static_cast<long long>(row_bytes));
  const int64_t blocks = std::min<int64_t>(args.blocks ? args.blocks : kMaxChannels, kMaxChannels);
  const int64_t per_block = std::min(ceil_div(rows, blocks), plan.most_rows), step = per_block * kMaxChannels;
  dispatch_float(dtype_of(input), [&](auto t) {
    dispatch_world(world, [&](auto size) {
      using T = typename decltype(t)::type;
      constexpr int N = decltype(size)::value;
      const auto kernel = plan.two_shot ? all_reduce_norm_kernel<T, N, true> : all_reduce_norm_kernel<T, N, false>;
      for (int64_t first = 0; first < rows; first += step) {
        const int64_t count = std::min(step, rows - first), start = first * hidden;
        Norm<T> norm = norm_of<T>(args, row_words);
        norm.residual += start;
        if (norm.out) norm.out += start;
        if (norm.quantized) {
          norm.quantized += start;
          norm.scale += first * (norm.grouped ? hidden / kGroup : 1);
        }
        launch_dependent("all_reduce_add_rmsnorm", comm.device(), stream, kernel,
                         static_cast<unsigned>(ceil_div(count, per_block)), kThreads, comm.view(),
                         Bytes{reinterpret_cast<char*>(data_ptr<T>(input) + start), count * row_bytes, true}, norm,
                         static_cast<int>(per_block * row_words));
      }
    });
  });
}

}  // namespace backend
}  // namespace radix
