// A step of a decoder on the CPU: its ops one after the other.
#include <algorithm>

#include "cpu/decoder/step.h"
#include "cpu/linear/kernels.h"
#include "cpu/thread_pool.h"

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

// The weights of a step's products, for threads that wait to fetch them ahead.
class ProductsAhead {
 public:
  explicit ProductsAhead(const rk_decoder_args& args) : args_(args) {}
  ~ProductsAhead() { cpu::fetch_while_waiting({}); }
  ProductsAhead(const ProductsAhead&) = delete;
  ProductsAhead& operator=(const ProductsAhead&) = delete;

  // Before op number i runs: the product that is next behind it, unless experts come before, whose weights nobody knows
  // yet.
  void tell(int64_t i) const {
    const bool multiplies = args_.ops[i].kind == RK_OP_LINEAR || args_.ops[i].kind == RK_OP_EXPERTS;
    if (i > 0 && !multiplies) return;  // what was told before the last product or experts still holds
    cpu::NextWeights weights;
    while (++i < args_.num_ops && args_.ops[i].kind != RK_OP_EXPERTS) {
      if (args_.ops[i].kind != RK_OP_LINEAR || !args_.ops[i].record) continue;
      weights = weights_of(*static_cast<const rk_linear_op*>(args_.ops[i].record));
      break;
    }
    cpu::fetch_while_waiting(weights);
  }

 private:
  // None where the op is refused when its turn comes.
  cpu::NextWeights weights_of(const rk_linear_op& op) const {
    if (!op.packed || op.packed->ndim != 1 || !op.desc) return {};
    const int64_t bytes = op.packed->shape[0];
    const int64_t ns = cpu::product_ns(bytes, args_.hidden->shape[0], op.desc->n, op.desc->k);
    const int64_t threads = std::clamp<int64_t>(ns / cpu::kLeastTaskNs + 1, 1, cpu::num_threads());
    return {data_ptr<char>(*op.packed), bytes, op.gate == RK_GATE_HALVES ? 2 : 1, static_cast<int>(threads)};
  }

  const rk_decoder_args& args_;
};

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
  const ProductsAhead ahead(args);
  for (int64_t i = 0; i < args.num_ops; i++) {
    ahead.tell(i);
    with_record(args.ops[i], [&](const auto& record) { run(step, record); });
  }
}

}  // namespace backend
}  // namespace radix
