// The device code of the collectives, run by threads: ranks that are out of step, channels that idle, a rank that does
// not come. Prints what was checked; exits with 1 and a text at the first wrong result.
#include "harness.h"

#include "gpu/comm/all_reduce.cu"

namespace {

using namespace emulated;
using namespace radix;

// One call of the sequence, the same on every rank.
struct Step {
  int kind, elements, blocks, per_block;
};

template <int N>
std::vector<Step> sequence(int calls) {
  std::minstd_rand random(5);
  std::vector<Step> steps;
  for (int i = 0; i < calls; i++) {
    Step s{};
    s.kind = static_cast<int>(random() % 4);
    // Places of a channel that a place of the tensor takes; two shots need whole shares.
    const int copies = s.kind == 1 ? 2 : N, unit = s.kind == 1 ? N : 1, bytes = s.kind == 3 ? 8 : 16;
    const int most = kSide / copies / unit * unit;
    s.per_block = unit * (1 + static_cast<int>(random() % (most / unit)));
    const int places = 1 + static_cast<int>(random() % (kBlocks * s.per_block));
    s.blocks = (places + s.per_block - 1) / s.per_block;
    s.elements = (places * bytes - static_cast<int>(random() % (bytes / 4)) * 4) / 4;  // of float
    steps.push_back(s);
  }
  return steps;
}

float input(int call, int rank, int at) {
  return static_cast<float>((call * 31 + rank * 7 + at) % 1000);
}
float total(int ranks, int call, int at) {
  float sum = 0;
  for (int r = 0; r < ranks; r++) sum += input(call, r, at);
  return sum;
}

template <int N>
void one_call(const PeerView& view, const Step& s, std::vector<float>& in, std::vector<float>& out) {
  if (static_cast<int>(blockIdx.x) >= s.blocks) return;
  const auto part = static_cast<int64_t>(s.elements) * 4;
  const bool aligned = s.elements % 4 == 0;
  const Bytes from{reinterpret_cast<char*>(in.data()), part, aligned},
      to{reinterpret_cast<char*>(out.data()), part, aligned};
  switch (s.kind) {
    case 0: return one_shot_kernel<float, N>(view, from, to, s.per_block);
    case 1: return two_shot_kernel<float, N>(view, from, to, s.per_block);
    case 2: return reduce_scatter_kernel<float, N>(view, from, part, to, s.per_block);
    default: return all_gather_kernel<N>(view, from, to, part, s.per_block);
  }
}

template <int N>
void check(const std::vector<Step>& steps, int rank, const std::vector<std::vector<float>>& outs) {
  for (int call = 0; call < static_cast<int>(steps.size()); call++) {
    const Step& s = steps[call];
    const auto& out = outs[call];
    for (int at = 0; at < s.elements; at++) {
      if (s.kind < 2 && out[at] != total(N, call, at)) fail_test("sum", call, at);
      if (s.kind == 2 && out[at] != total(N, call, rank * s.elements + at)) fail_test("scatter", call, at);
      for (int r = 0; s.kind == 3 && r < N; r++)
        if (out[r * s.elements + at] != input(call, r, at)) fail_test("gather", call, at);
    }
    // Nothing behind the end was written.
    const int end = s.kind == 3 ? N * s.elements : s.elements;
    for (size_t at = end; at < out.size(); at++)
      if (out[at] != -1) fail_test("past the end", call, static_cast<int>(at));
  }
}

template <int N>
void test_sequence(int calls) {
  Machine<N> machine;
  const auto steps = sequence<N>(calls);
  std::vector<std::vector<float>> outs[N];
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < N; rank++)
    ranks.emplace_back([&, rank] {
      std::vector<std::vector<float>> ins(calls);
      outs[rank].resize(calls);
      for (int call = 0; call < calls; call++) {
        const int n = N * steps[call].elements;
        for (int at = 0; at < n; at++) ins[call].push_back(input(call, rank, at));
        outs[rank][call].assign(n + 8, -1);
      }
      const PeerView view = machine.view(rank, 10'000'000'000);
      run_rank(calls, 100 * rank, [&](int call) { one_call<N>(view, steps[call], ins[call], outs[rank][call]); });
      check<N>(steps, rank, outs[rank]);
    });
  for (auto& rank : ranks) rank.join();
  if (machine.control[0] != 0) fail_test("a wait ran into its limit", calls, 0);
  if (!machine.all_empty()) fail_test("staging memory is not empty at the end", calls, 0);
  std::printf("%d ranks: %d calls of four kinds\n", N, calls);
}

// Rank 1 stays away: rank 0 ends within the limit, says whom it waited for and tells the group.
void test_missing_rank() {
  Machine<2> machine;
  std::vector<float> data(40, 1), out(40);
  const auto start = std::chrono::steady_clock::now();
  const PeerView view = machine.view(0, 100'000'000);
  run_rank(3, 1, [&](int) { one_call<2>(view, {0, 40, 2, 5}, data, out); });
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
  if (machine.control[kLineWords + 1] != kLate + 1 || machine.control[0] != 1) fail_test("control page", 0, 0);
  if (took.count() < 0.1 || took.count() > 20) fail_test("time limit", 0, 0);
  std::printf("missing rank: seen\n");
}

// A host aborts: the wait ends though its limit is far, and the reason is told.
void test_abort() {
  Machine<4> machine;
  std::thread host([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    __atomic_store_n(&machine.control[0], uint64_t{3}, __ATOMIC_SEQ_CST);
  });
  std::vector<float> data(40, 1), out(40);
  const PeerView view = machine.view(1, uint64_t{600} << 30);
  run_rank(1, 1, [&](int) { one_call<4>(view, {1, 40, 2, 8}, data, out); });
  host.join();
  if (machine.control[2 * kLineWords + 1] != 3 || machine.control[0] != 3) fail_test("control page", 0, 1);
  std::printf("abort: seen\n");
}

}  // namespace

int main() {
  test_sequence<2>(3000);
  test_sequence<4>(1000);
  test_missing_rank();
  test_abort();
  return 0;
}
