// Penalties and the draw on the CPU: arguments, edits of the logits, rows over the pool. row.cpp draws.
#include "api/sampling.h"

#include "common/tensor.h"
#include "cpu/sampling/sampling.h"
#include "cpu/thread_pool.h"

namespace radix {
namespace {

using namespace cpu;

constexpr int32_t kInPrompt = 1 << 30;
constexpr float kInf = __builtin_inff();

struct Settings {
  const float *temperature, *top_p, *min_p;
  const int32_t* top_k;
  const int64_t *seed, *position;

  RowSettings of(int64_t b, uint32_t stream) const {
    return {temperature[b],
            top_p[b],
            min_p[b],
            top_k[b],
            static_cast<uint64_t>(seed[b]),
            static_cast<uint32_t>(position[b]),
            stream};
  }
};

// Calls fn(row) for each of `rows`: a row a thread or, with fewer rows than threads, one row after the other, each by
// all threads.
template <class Fn>
void each_row(int64_t rows, const Fn& fn) {
  if (rows < num_threads()) {
    for (int64_t b = 0; b < rows; b++) fn(b);
  } else {
    parallel_for(rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t b = begin; b < end; b++) fn(b);
    });
  }
}

// Rows of a [.., V] tensor of 4-byte words.
template <class T>
T* row_of(const rk_tensor& t, int64_t row) {
  return data_ptr<T>(t) + row * t.strides[0];
}

// counts: the row's words. See apply_penalties.
void penalise(float* x, const int32_t* counts, int64_t n, float repetition, float frequency, float presence) {
  for (int64_t i = 0; i < n; i++) {
    if (counts[i] == 0) continue;
    x[i] = x[i] > 0 ? x[i] / repetition : x[i] * repetition;
    const int32_t count = counts[i] & (kInPrompt - 1);
    if (count > 0) x[i] -= frequency * static_cast<float>(count) + presence;
  }
}

void check_slots(const char* op, const rk_tensor& slots, const rk_tensor& counts) {
  const int32_t* slot = data_ptr<int32_t>(slots);
  for (int64_t b = 0; b < slots.shape[0]; b++)
    if (slot[b] < -1 || slot[b] >= counts.shape[0])
      fail(RK_INVALID, "%s: slots[%lld] is %d, expected -1 to %lld (rows of counts)", op, (long long)b, slot[b],
           (long long)counts.shape[0] - 1);
}

bool edits_logits(const rk_top_k_top_p_sampling_args& a) {
  return a.bias_ids || a.counts || a.stop_ids;
}

// A row's list of ids [M], ended by a negative one; ids past the vocabulary are skipped.
template <class Fn>
void for_each_listed(const rk_tensor& lists, int64_t b, int64_t n, const Fn& fn) {
  const int64_t count = lists.shape[1];
  const int32_t* ids = data_ptr<int32_t>(lists) + b * count;
  for (int64_t i = 0; i < count && ids[i] >= 0; i++)
    if (ids[i] < n) fn(ids[i], b * count + i);
}

// A copy of row b with bias, penalties and minimum of tokens applied, in this thread's memory.
const float* edited_row(const rk_top_k_top_p_sampling_args& a, int64_t b) {
  static thread_local std::vector<float> edited;
  const float* logits = row_of<const float>(*a.logits, b);
  const int64_t n = a.logits->shape[1];
  edited.assign(logits, logits + n);
  float* x = edited.data();
  if (a.bias_ids)
    for_each_listed(*a.bias_ids, b, n, [&](int32_t id, int64_t at) { x[id] += data_ptr<float>(*a.bias_values)[at]; });
  if (a.counts) {
    const int32_t slot = data_ptr<int32_t>(*a.slots)[b];
    if (slot >= 0)
      penalise(x, row_of<int32_t>(*a.counts, slot), n, data_ptr<float>(*a.repetition)[b],
               data_ptr<float>(*a.frequency)[b], data_ptr<float>(*a.presence)[b]);
  }
  if (a.stop_ids && data_ptr<int64_t>(*a.position)[b] < data_ptr<int64_t>(*a.min_position)[b])
    for_each_listed(*a.stop_ids, b, n, [&](int32_t id, int64_t) { x[id] = -kInf; });
  return x;
}

}  // namespace

namespace backend {

int64_t sampling_workspace_size(int64_t, int64_t) {
  return 0;
}

void apply_penalties(const rk_apply_penalties_args& args, rk_stream) {
  check_slots("apply_penalties_inplace", *args.slots, *args.counts);
  const int64_t n = args.logits->shape[1];
  const int32_t* slots = data_ptr<int32_t>(*args.slots);
  const float* repetition = data_ptr<float>(*args.repetition);
  const float* frequency = data_ptr<float>(*args.frequency);
  const float* presence = data_ptr<float>(*args.presence);
  parallel_for(args.logits->shape[0], 1, [&](int64_t begin, int64_t end) noexcept {
    for (int64_t b = begin; b < end; b++) {
      if (slots[b] >= 0)
        penalise(row_of<float>(*args.logits, b), row_of<int32_t>(*args.counts, slots[b]), n, repetition[b],
                 frequency[b], presence[b]);
    }
  });
}

void count_tokens(const rk_count_tokens_args& args, rk_stream) {
  check_slots("count_tokens_inplace", *args.slots, *args.counts);
  const int32_t* slots = data_ptr<int32_t>(*args.slots);
  const int32_t* ids = data_ptr<int32_t>(*args.ids);
  const int64_t rows = args.slots->shape[0], n = args.counts->shape[1];
  for (int64_t b = 0; b < rows; b++)
    if (ids[b] < -1 || ids[b] >= n)
      fail(RK_INVALID, "count_tokens_inplace: ids[%lld] is %d, expected -1 to %lld (columns of counts)", (long long)b,
           ids[b], (long long)n - 1);
  for (int64_t b = 0; b < rows; b++)
    if (slots[b] >= 0 && ids[b] >= 0) row_of<int32_t>(*args.counts, slots[b])[ids[b]]++;
}

void top_k_top_p_sampling(const rk_top_k_top_p_sampling_args& args, rk_stream) {
  const Settings s{data_ptr<float>(*args.temperature), data_ptr<float>(*args.top_p),
                   data_ptr<float>(*args.min_p),       data_ptr<int32_t>(*args.top_k),
                   data_ptr<int64_t>(*args.seed),      data_ptr<int64_t>(*args.position)};
  if (args.counts) check_slots("top_k_top_p_sampling", *args.slots, *args.counts);
  const bool edits = edits_logits(args);
  const int64_t n = args.logits->shape[1], top_n = args.logprob ? args.top_ids->shape[1] : 0;
  int32_t* out = data_ptr<int32_t>(*args.out);
  each_row(args.logits->shape[0], [&](int64_t b) {
    const float* logits = row_of<const float>(*args.logits, b);
    const uint32_t* allowed = args.bitmask ? row_of<const uint32_t>(*args.bitmask, b) : nullptr;
    out[b] = draw_row(edits ? edited_row(args, b) : logits, allowed, n, s.of(b, args.draw_stream));
    if (args.logprob)
      row_logprobs(logits, n, out[b], top_n, data_ptr<float>(*args.logprob) + b,
                   data_ptr<float>(*args.top_logprobs) + b * top_n, data_ptr<int32_t>(*args.top_ids) + b * top_n);
  });
}

}  // namespace backend
}  // namespace radix
