// The family's entries: from checked tensors to one Problem, and the path by its number of pairs.
#include "api/experts.h"

#include "gpu/device/fp8.h"
#include "gpu/device/launch.h"
#include "sm90/experts/grouped_persistent.cuh"
#include "sm90/experts/workspace.cuh"

namespace radix {
namespace experts {

namespace {

// Pairs of an expert, in the mean, from which on the persistent kernel's tiles of 128 are the faster ones.
constexpr int kPersistentPairs = 192;

}  // namespace
}  // namespace experts

namespace backend {

using namespace experts;

int64_t fused_experts_workspace_size(const rk_fused_experts_sizes& s) {
  return Workspace(s).all;
}

void fused_experts(const rk_fused_experts_args& args, rk_stream stream) {
  const rk_tensor &x = *args.hidden_states, &w2 = *args.w2, &ids = *args.topk_ids, &out = *args.out;
  Problem q = {};
  q.device = x.device;
  q.stream = stream;
  q.type = dtype_of(x);
  q.routing = {data_ptr<int32_t>(ids),
               args.expert_map ? data_ptr<int32_t>(*args.expert_map) : nullptr,
               data_ptr<float>(*args.topk_weights),
               static_cast<int>(ids.shape[0]),
               static_cast<int>(ids.shape[1]),
               static_cast<int>(args.expert_map ? args.expert_map->shape[0] : w2.shape[0]),
               static_cast<int>(w2.shape[0])};
  q.x = data_ptr<char>(x);
  q.w1 = data_ptr<char>(*args.w1);
  q.w2 = data_ptr<char>(w2);
  q.x_step = x.strides[0] * 2;
  q.experts = static_cast<int>(w2.shape[0]);
  q.hidden = static_cast<int>(w2.shape[1]);
  q.inter = static_cast<int>(w2.shape[2]);
  q.out = data_ptr<char>(out);
  q.out_step = out.strides[0];
  q.workspace = data_ptr<char>(*args.workspace);
  const bool fp8 = args.w1_scale != nullptr, bf = q.type == DType::bf16;
  if (fp8) {
    q.w1_scale = data_ptr<float>(*args.w1_scale);
    q.w2_scale = data_ptr<float>(*args.w2_scale);
    q.block_scales = args.w1_scale->ndim == 3;
    q.fp8_activations = args.use_fp8_w8a8 != 0;
  }
  if (q.fits_mma_m16()) {
    const auto launch = fp8 ? (bf ? grouped_mma_m16<bf16, e4m3> : grouped_mma_m16<f16, e4m3>)
                            : (bf ? grouped_mma_m16<bf16, bf16> : grouped_mma_m16<f16, f16>);
    return launch(q);
  }
  const Workspace at({sizeof(rk_fused_experts_sizes), ids.shape[0], ids.shape[1], q.routing.named, q.hidden, q.inter});
  Scratch scratch = at.scratch(q.workspace);
  if (q.fp8_activations) {  // they take half of their room, and their scales a sixteenth of the rest
    scratch.act_scales = reinterpret_cast<float*>(scratch.act + int64_t{q.pairs()} * q.inter);
    scratch.row_scales = reinterpret_cast<float*>(scratch.rows + int64_t{q.pairs()} * q.hidden);
    scratch.scale_step = (q.pairs() + 3) / 4 * 4;
    if (bf && q.pairs() > kPersistentPairs * q.routing.named) {
      scratch.places = reinterpret_cast<int32_t*>(q.workspace + at.places);
      scratch.tiles = q.workspace + at.tiles;
      scratch.act_scales = reinterpret_cast<float*>(q.workspace + at.act_scales);
      return grouped_persistent_experts(q, scratch);
    }
    return (bf ? grouped_swap_ab<bf16, Format::fp8> : grouped_swap_ab<f16, Format::fp8>)(q, scratch);
  }
  const auto launch = fp8 ? (bf ? grouped_swap_ab<bf16, Format::widened> : grouped_swap_ab<f16, Format::widened>)
                          : (bf ? grouped_swap_ab<bf16, Format::half> : grouped_swap_ab<f16, Format::half>);
  launch(q, scratch);
}

}  // namespace backend
}  // namespace radix
