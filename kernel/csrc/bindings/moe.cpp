#include "radix_kernels/moe.h"

#include "bindings/exchange.h"

namespace radix::bind {

void bind_moe(py::module_& m) {
  m.def("topk_softmax",
        [](py::handle gating_output, bool renormalize, int num_expert_group, int topk_group,
           int num_fused_shared_experts, float routed_scaling_factor, py::handle topk_weights, py::handle topk_ids) {
          Call call("topk_softmax");
          rk_topk_softmax_args args{sizeof args};
          args.renormalize = renormalize;
          args.gating_output = call.in("gating_output", gating_output);
          args.topk_weights = call.out("topk_weights", topk_weights);
          args.topk_ids = call.out("topk_ids", topk_ids);
          args.num_expert_group = num_expert_group;
          args.topk_group = topk_group;
          args.num_fused_shared_experts = num_fused_shared_experts;
          args.routed_scaling_factor = routed_scaling_factor;
          call.run(rk_topk_softmax, args);
        });
  m.def("topk_sigmoid", [](py::handle gating_output, bool renormalize, py::handle correction_bias,
                           int num_fused_shared_experts, py::handle topk_weights, py::handle topk_ids) {
    Call call("topk_sigmoid");
    rk_topk_sigmoid_args args{sizeof args};
    args.renormalize = renormalize;
    args.gating_output = call.in("gating_output", gating_output);
    args.correction_bias = call.optional_in("correction_bias", correction_bias);
    args.topk_weights = call.out("topk_weights", topk_weights);
    args.topk_ids = call.out("topk_ids", topk_ids);
    args.num_fused_shared_experts = num_fused_shared_experts;
    call.run(rk_topk_sigmoid, args);
  });
  m.def("moe_fused_gate",
        [](py::handle input, py::handle bias, int num_expert_group, int topk_group, float routed_scaling_factor,
           int num_fused_shared_experts, py::handle topk_weights, py::handle topk_ids) {
          Call call("moe_fused_gate");
          rk_moe_fused_gate_args args{sizeof args};
          args.num_expert_group = num_expert_group;
          args.topk_group = topk_group;
          args.routed_scaling_factor = routed_scaling_factor;
          args.num_fused_shared_experts = num_fused_shared_experts;
          args.input = call.in("input", input);
          args.bias = call.in("bias", bias);
          args.topk_weights = call.out("topk_weights", topk_weights);
          args.topk_ids = call.out("topk_ids", topk_ids);
          call.run(rk_moe_fused_gate, args);
        });
  m.def("moe_align_block_size",
        [](py::handle topk_ids, int num_experts, int block_size, py::handle expert_map, py::handle sorted_token_ids,
           py::handle expert_ids, py::handle num_tokens_post_padded) {
          Call call("moe_align_block_size");
          rk_moe_align_block_size_args args{sizeof args};
          args.num_experts = num_experts;
          args.block_size = block_size;
          args.topk_ids = call.in("topk_ids", topk_ids);
          args.expert_map = call.optional_in("expert_map", expert_map);
          args.sorted_token_ids = call.out("sorted_token_ids", sorted_token_ids);
          args.expert_ids = call.out("expert_ids", expert_ids);
          args.num_tokens_post_padded = call.out("num_tokens_post_padded", num_tokens_post_padded);
          call.run(rk_moe_align_block_size, args);
        });
  m.def("moe_sum", [](py::handle input, py::handle out) {
    Call call("moe_sum");
    rk_moe_sum_args args{sizeof args};
    args.input = call.in("input", input);
    args.out = call.out("out", out);
    call.run(rk_moe_sum, args);
  });
}

}  // namespace radix::bind
