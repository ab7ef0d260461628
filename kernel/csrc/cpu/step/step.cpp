// The tensors of a step and its accepted tokens on the CPU: some hundred integers, on the caller's thread.
#include "api/step.h"

#include <cstring>

#include "common/step.h"

namespace radix::backend {
namespace {

void require(bool valid, const char* op, const char* what, int64_t index) {
  if (!valid) fail(RK_INVALID, "%s: %s %ld names an element outside of its tensor", op, what, index);
}

void check(const StepTensors& step) {
  const char* op = "fill_step_tensors";
  int32_t value;
  int64_t slot;
  for (int64_t i = 0; i < step.num_entries; i++) require(step.has_row(i) && step.length_of(i, value), op, "entry", i);
  for (int64_t t = 0; t < step.num_tokens; t++) {
    const bool valid = step.position_of(t, value) && step.slot_of(t, value, slot) && step.id_of(t, value);
    require(valid, op, "token", t);
  }
  for (int64_t s = 0; s < step.num_samples; s++)
    require(step.sample_tokens[s] >= 0 && step.sample_tokens[s] < step.num_tokens, op, "sample", s);
}

}  // namespace

void fill_step_tensors(const rk_fill_step_tensors_args& args, rk_stream) {
  const StepTensors step(args);
  check(step);
  for (int64_t t = 0; t < step.num_tokens; t++) step.fill_token(t);
  for (int64_t s = 0; s < step.num_samples; s++) step.fill_sample(s);
  for (int64_t i = 0; i < step.num_entries; i++) {
    std::memcpy(step.page_table + i * step.width, step.row_pages + step.entries[i] * step.row_width,
                static_cast<size_t>(step.width) * sizeof(int32_t));
  }
  for (int64_t i = 0; i < step.num_entries; i++) step.fill_entry(i);
}

void accept_tokens(const rk_accept_tokens_args& args, rk_stream) {
  const AcceptedTokens step(args);
  for (int64_t i = 0; i < step.num_entries; i++) require(step.is_valid(i), "accept_tokens", "entry", i);
  for (int64_t i = 0; i < step.num_entries; i++) step.committed_len[step.grow_rows[i]] += step.accept(i);
}

}  // namespace radix::backend
