// Decoder: checks of what the ops share. Each op's own arguments are checked by the entry that it is.
#include "api/decoder.h"

#include "common/tensor.h"

using namespace radix;

namespace {

constexpr const char* kOp = "decoder";
constexpr int64_t kAlign = 256;

void check_hidden(const rk_decoder_args& a) {
  const Arg hidden(kOp, "hidden", a.hidden);
  const Arg table(kOp, "page_table", a.page_table);
  hidden.backend_device().ndim(2).contiguous().writable();
  if (hidden->device.type != RK_DEVICE_CPU) hidden.reject(RK_UNSUPPORTED, "is on a GPU, this op runs on the CPU");
  table.ndim(2);
  if (a.num_buffers < 1 || !a.buffers) fail(RK_INVALID, "%s: there are no buffers", kOp);
  if (a.num_ops < 1 || !a.ops) fail(RK_INVALID, "%s: there are no ops", kOp);
  hidden.dtype({dtype_of(a.buffers[0].dtype)}).shape({-1, a.buffers[0].columns}, "columns of the first buffer");
}

void check_lengths(const rk_decoder_args& a) {
  const int64_t rows = a.page_table->shape[0];
  const Arg hidden(kOp, "hidden", a.hidden);
  const Arg lens(kOp, "kv_lens", a.kv_lens);
  const Arg cu(kOp, "cu_seqlens_q", a.cu_seqlens_q);
  lens.same_device(hidden).dtype({DType::i32}).shape({rows}, "rows of page_table").contiguous();
  cu.same_device(hidden).dtype({DType::i32}).shape({rows + 1}, "rows of page_table, plus 1").contiguous();
}

// Latent attention asks for memory by the lengths of these entries. Where there are any check_lengths came before.
void check_expanded(const rk_decoder_args& a) {
  const int64_t rows = a.page_table->shape[0];
  if (a.num_expanded < 0 || a.num_expanded > rows)
    fail(RK_INVALID, "%s: num_expanded is %lld, expected 0 to %lld (rows of page_table)", kOp,
         (long long)a.num_expanded, (long long)rows);
  if (a.num_expanded == 0) return;
  const int32_t* const begins = data_ptr<int32_t>(*a.cu_seqlens_q);
  for (int64_t b = 0; b < rows; b++)
    if (begins[b + 1] < begins[b])
      fail(RK_INVALID, "%s: cu_seqlens_q[%lld] is %d, less than the one before (%d)", kOp, (long long)b + 1,
           begins[b + 1], begins[b]);
  if (begins[0] != 0 || begins[rows] != a.hidden->shape[0])
    fail(RK_INVALID, "%s: cu_seqlens_q goes from %d to %d, expected 0 to %lld (tokens of hidden)", kOp, begins[0],
         begins[rows], (long long)a.hidden->shape[0]);
}

// hidden and page_table are checked, the lengths too where they are read.
DecoderPlan plan_of(const rk_decoder_args& a) {
  check_expanded(a);
  DecoderPlan plan;
  plan.tokens = a.hidden->shape[0];
  plan.offsets.assign(1, 0);
  int64_t bytes = 0;
  for (int32_t i = 1; i < a.num_buffers; i++) {
    const rk_decoder_buffer& buffer = a.buffers[i];
    if (buffer.columns < 1) fail(RK_INVALID, "%s: buffer %d has no columns", kOp, i);
    plan.offsets.push_back(bytes);
    bytes += (plan.tokens * buffer.columns * (buffer.dtype.bits / 8) + kAlign - 1) / kAlign * kAlign;
  }
  plan.scratch = bytes;
  plan.scratch_bytes = backend::decoder_scratch_bytes(a);
  plan.bytes = bytes + plan.scratch_bytes;
  return plan;
}

}  // namespace

rk_status rk_decoder(const rk_decoder_args* args, rk_stream) {
  return guard([&] {
    const auto a = read_args(kOp, args);
    check_hidden(a);
    check_lengths(a);
    const DecoderPlan plan = plan_of(a);
    const Arg workspace(kOp, "workspace", a.workspace);
    workspace.backend_device().dtype({DType::u8}).ndim(1).contiguous().writable();
    if (workspace.size(0) < plan.bytes + kAlign)
      workspace.reject(RK_INVALID, "has %lld bytes, expected at least %lld", (long long)workspace.size(0),
                       (long long)(plan.bytes + kAlign));
    if (plan.tokens == 0) return;
    const auto begin = reinterpret_cast<uintptr_t>(data_ptr<char>(*workspace));
    backend::decoder(a, plan, reinterpret_cast<char*>((begin + kAlign - 1) / kAlign * kAlign));
  });
}

rk_status rk_decoder_workspace_size(const rk_decoder_args* args, int64_t* bytes) {
  return guard([&] {
    const char* op = "decoder_workspace_size";
    if (!bytes) fail(RK_INVALID, "%s: bytes is required", op);
    const auto a = read_args(op, args);
    check_hidden(a);
    if (a.num_expanded != 0) check_lengths(a);
    *bytes = plan_of(a).bytes + kAlign;  // the caller's memory may begin anywhere
  });
}
