// All-reduce with residual add, RMSNorm and quantization, run by threads. The test makes all_reduce_norm.cu of csrc/gpu
// with blocks of four threads.
#include "harness.h"

#include "all_reduce_norm.cu"

namespace {

using namespace emulated;
using namespace radix;

struct Step {
  int rows, words, rows_per_block;
  bool two_shot, quantized, weight_is_float;
};

template <int N>
std::vector<Step> sequence(int calls) {
  std::minstd_rand random(9);
  std::vector<Step> steps;
  for (int i = 0; i < calls; i++) {
    Step s{};
    s.two_shot = random() % 2;
    s.words = 1 + static_cast<int>(random() % 10);
    const int most = (s.two_shot ? kSide / 2 - N : kSide / N) / s.words;
    s.rows_per_block = 1 + static_cast<int>(random() % std::max(most, 1));
    if (most < 1) s.words = 1;
    s.rows = 1 + static_cast<int>(random() % (kBlocks * s.rows_per_block));
    s.quantized = random() % 2;
    s.weight_is_float = random() % 2;
    steps.push_back(s);
  }
  return steps;
}

float input(int call, int rank, int at) {
  return static_cast<float>((call * 31 + rank * 7 + at * 5) % 200 - 100);
}
float weight(int at) {
  return 0.5f + static_cast<float>(at % 9) / 8;
}

// Of one call on one rank.
struct Tensors {
  std::vector<float> in, residual, out, weight, scale;
  std::vector<e4m3> quantized;

  Tensors(const Step& s, int call, int rank) {
    const int hidden = 4 * s.words, n = s.rows * hidden;
    for (int at = 0; at < n; at++) in.push_back(input(call, rank, at)), residual.push_back(static_cast<float>(at % 13));
    for (int at = 0; at < hidden; at++) weight.push_back(::weight(at));
    out.assign(n, -1);
    scale.assign(s.rows, -1);
    quantized.assign(n, e4m3{0x7f});
  }
};

template <int N>
void one_call(const PeerView& view, const Step& s, Tensors& t) {
  if (static_cast<int>(blockIdx.x) * s.rows_per_block >= s.rows) return;
  Norm<float> norm{};
  norm.residual = t.residual.data();
  norm.weight = t.weight.data();
  norm.weight_is_float = s.weight_is_float;  // float is both the rows' type and the weight's
  norm.eps = 1e-5f;
  norm.out = s.quantized ? nullptr : t.out.data();
  norm.quantized = s.quantized ? t.quantized.data() : nullptr;
  norm.scale = t.scale.data();
  norm.words = s.words;
  const Bytes in{reinterpret_cast<char*>(t.in.data()), static_cast<int64_t>(t.in.size()) * 4, true};
  const auto kernel = s.two_shot ? all_reduce_norm_kernel<float, N, true> : all_reduce_norm_kernel<float, N, false>;
  kernel(view, in, norm, s.rows_per_block * s.words);
}

template <int N>
void check(const Step& s, int call, const Tensors& t) {
  const int hidden = 4 * s.words;
  for (int row = 0; row < s.rows; row++) {
    double squares = 0, largest = 0;
    std::vector<double> x(hidden);
    for (int i = 0; i < hidden; i++) {
      const int at = row * hidden + i;
      x[i] = at % 13;
      for (int r = 0; r < N; r++) x[i] += input(call, r, at);
      if (t.residual[at] != static_cast<float>(x[i])) fail_test("residual", call, at);
      squares += x[i] * x[i];
    }
    const double factor = 1 / std::sqrt(squares / hidden + 1e-5);
    for (int i = 0; i < hidden; i++) largest = std::max(largest, std::fabs(x[i] *= factor * weight(i)));
    const double scale = std::max(largest, 1e-10) / 448;
    for (int i = 0; i < hidden; i++) {
      const int at = row * hidden + i;
      if (!s.quantized && std::fabs(t.out[at] - x[i]) > 1e-5 * largest) fail_test("norm", call, at);
      if (!s.quantized) continue;
      if (std::fabs(t.scale[row] - scale) > 1e-5 * scale) fail_test("scale", call, at);
      const double error = std::fabs(e4m3_value(t.quantized[at].bits) * scale - x[i]);
      if (error > std::fabs(x[i]) / 15.9 + scale / 1000) fail_test("quantized", call, at);
    }
  }
}

template <int N>
void test(int calls) {
  Machine<N> machine;
  const auto steps = sequence<N>(calls);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < N; rank++)
    ranks.emplace_back([&, rank] {
      std::vector<Tensors> tensors;
      for (int call = 0; call < calls; call++) tensors.emplace_back(steps[call], call, rank);
      const PeerView view = machine.view(rank, 10'000'000'000);
      run_rank(calls, 50 * rank, [&](int call) { one_call<N>(view, steps[call], tensors[call]); });
      for (int call = 0; call < calls; call++) check<N>(steps[call], call, tensors[call]);
    });
  for (auto& rank : ranks) rank.join();
  if (machine.control[0] != 0) fail_test("a wait ran into its limit", calls, 0);
  if (!machine.all_empty()) fail_test("staging memory is not empty at the end", calls, 0);
  std::printf("%d ranks: %d norms\n", N, calls);
}

// The default communicator's sides. A row of 32 KiB takes a quarter of one.
void test_plan() {
  constexpr int64_t kDefaultSide = 8192, kWords = 2048;
  for (int world : {2, 4, 8})
    for (int64_t rows : {1, 4, 1000}) {
      if (plan_all_reduce_norm(world, rows, kWords, kDefaultSide, 0).most_rows < 1)
        fail_test("a row of 32 KiB does not fit", world, static_cast<int>(rows));
      const auto one_shot = plan_all_reduce_norm(world, rows, kWords, kDefaultSide, RK_ALL_REDUCE_ONE_SHOT);
      if (one_shot.two_shot || one_shot.most_rows != 4 / world) fail_test("one shot was asked for", world, 0);
    }
  if (plan_all_reduce_norm(8, 1, kWords / 2, kDefaultSide, 0).two_shot) fail_test("one row of 16 KiB, 8 ranks", 8, 1);
}

}  // namespace

int main() {
  test_plan();
  test<2>(1000);
  test<4>(500);
  return 0;
}
