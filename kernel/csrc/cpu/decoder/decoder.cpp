// A step of a decoder on the CPU: its ops one after the other.
#include <algorithm>

#include "cpu/decoder/step.h"

namespace radix {
namespace {

using namespace cpu::decoder;

// Calls fn(record) with the record of an op.
template <class Fn>
void with_record(const rk_decoder_op& op, const Fn& fn) {
  if (!op.record) fail(RK_INVALID, "decoder: an op has no record");
  switch (op.kind) {
    case RK_OP_RMSNORM: return fn(*static_cast<const rk_rmsnorm_op*>(op.record));
    case RK_OP_LINEAR: return fn(*static_cast<const rk_linear_op*>(op.record));
    case RK_OP_ROPE_STORE: return fn(*static_cast<const rk_rope_store_op*>(op.record));
    case RK_OP_ATTENTION: return fn(*static_cast<const rk_attention_op*>(op.record));
    case RK_OP_GATED_ACTIVATION: return fn(*static_cast<const rk_gated_activation_op*>(op.record));
    case RK_OP_ADD: return fn(*static_cast<const rk_add_op*>(op.record));
    case RK_OP_ROUTE: return fn(*static_cast<const rk_route_op*>(op.record));
    case RK_OP_EXPERTS: return fn(*static_cast<const rk_experts_op*>(op.record));
    case RK_OP_LATENT_STORE: return fn(*static_cast<const rk_latent_store_op*>(op.record));
    case RK_OP_LATENT_ATTENTION: return fn(*static_cast<const rk_latent_attention_op*>(op.record));
    case RK_OP_LATENT_PREFILL: return fn(*static_cast<const rk_latent_prefill_op*>(op.record));
    case RK_OP_SCALE: return fn(*static_cast<const rk_scale_op*>(op.record));
  }
  fail(RK_INVALID, "decoder: an op has kind %d", static_cast<int>(op.kind));
}

template <class Record>
int64_t bytes_of(const rk_decoder_args& args, const Record& record) {
  if constexpr (std::is_same_v<Record, rk_attention_op> || std::is_same_v<Record, rk_experts_op> ||
                std::is_same_v<Record, rk_latent_attention_op> || std::is_same_v<Record, rk_latent_prefill_op>)
    return scratch_bytes(args, record);
  return 0;
}

}  // namespace

namespace backend {

int64_t decoder_scratch_bytes(const rk_decoder_args& args) {
  int64_t most = 0;
  for (int64_t i = 0; i < args.num_ops; i++)
    with_record(args.ops[i], [&](const auto& record) { most = std::max(most, bytes_of(args, record)); });
  return most;
}

void decoder(const rk_decoder_args& args, const DecoderPlan& plan, char* memory) {
  const Step step(args, plan, memory);
  for (int64_t i = 0; i < args.num_ops; i++) with_record(args.ops[i], [&](const auto& record) { run(step, record); });
}

}  // namespace backend
}  // namespace radix
