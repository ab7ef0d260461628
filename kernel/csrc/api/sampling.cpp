// Sampling family: checks once for every backend, then the backend's kernel.
#include "api/sampling.h"

#include "api/sampling_checks.h"

using namespace radix;

namespace {

void check_top(const char* op, const Arg& logits, const Arg& logprob, const Arg& top, const Arg& top_ids) {
  check_row_values(logprob, logits, DType::f32);
  logprob.writable();
  top.same_device(logits).dtype({DType::f32}).ndim(2).contiguous().writable();
  if (top.size(1) > logits.size(1))
    fail(RK_INVALID, "%s: top_n is %lld, expected 0 to %lld (columns of logits)", op, (long long)top.size(1),
         (long long)logits.size(1));
  top.shape({logits.size(0), -1}, "rows of logits, top_n");
  top_ids.same_device(logits).dtype({DType::i32}).same_shape(top).contiguous().writable();
}

}  // namespace

rk_status rk_apply_penalties(const rk_apply_penalties_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "apply_penalties_inplace";
    const auto a = read_args(op, args);
    const Arg logits(op, "logits", a.logits), counts(op, "counts", a.counts), slots(op, "slots", a.slots);
    check_logits(logits);
    logits.writable();
    check_penalties(logits, counts, slots, Arg(op, "repetition", a.repetition), Arg(op, "frequency", a.frequency),
                    Arg(op, "presence", a.presence));
    if (logits.numel() > 0) backend::apply_penalties(a, stream);
  });
}

rk_status rk_count_tokens(const rk_count_tokens_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "count_tokens_inplace";
    const auto a = read_args(op, args);
    const Arg counts(op, "counts", a.counts), slots(op, "slots", a.slots), ids(op, "ids", a.ids);
    counts.backend_device().dtype({DType::i32}).ndim(2).last_contiguous().writable();
    slots.same_device(counts).dtype({DType::i32}).ndim(1).contiguous();
    ids.same_device(counts).dtype({DType::i32}).same_shape(slots).contiguous();
    if (ids.numel() > 0) backend::count_tokens(a, stream);
  });
}

rk_status rk_sampling_workspace_size(const rk_sampling_sizes* sizes, int64_t* bytes) {
  return guard([&] {
    const auto a = read_args("sampling_workspace_size", sizes);
    if (a.rows < 0 || a.columns < 0) fail(RK_INVALID, "sampling_workspace_size: negative size");
    *bytes = backend::sampling_workspace_size(a.rows, a.columns);
  });
}

rk_status rk_top_k_top_p_sampling(const rk_top_k_top_p_sampling_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "top_k_top_p_sampling";
    const auto a = read_args(op, args);
    const Arg logits(op, "logits", a.logits), out(op, "out", a.out);
    check_logits(logits);
    check_settings(op, logits, a);
    check_row_values(out, logits, DType::i32);
    out.writable();
    check_edits(op, logits, a);
    if (given(op, {{"logprob", a.logprob}, {"top_logprobs", a.top_logprobs}, {"top_ids", a.top_ids}}))
      check_top(op, logits, Arg(op, "logprob", a.logprob), Arg(op, "top_logprobs", a.top_logprobs),
                Arg(op, "top_ids", a.top_ids));
    check_workspace(op, logits, a.workspace);
    if (logits.size(0) > 0) backend::top_k_top_p_sampling(a, stream);
  });
}

rk_status rk_token_logprobs(const rk_token_logprobs_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "token_logprobs";
    const auto a = read_args(op, args);
    const Arg logits(op, "logits", a.logits);
    check_logits(logits);
    check_row_values(Arg(op, "ids", a.ids), logits, DType::i32);
    check_top(op, logits, Arg(op, "logprob", a.logprob), Arg(op, "top_logprobs", a.top_logprobs),
              Arg(op, "top_ids", a.top_ids));
    check_workspace(op, logits, a.workspace);
    if (logits.size(0) > 0) backend::token_logprobs(a, stream);
  });
}
