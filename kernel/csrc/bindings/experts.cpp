#include "radix_kernels/experts.h"

#include "bindings/packed_desc.h"

namespace radix::bind {

void bind_experts(py::module_& m) {
  m.def("fused_experts", [](py::handle hidden_states, py::handle w1, py::handle w2, py::handle topk_weights,
                            py::handle topk_ids, py::handle w1_scale, py::handle w2_scale, py::handle expert_map,
                            py::handle out, py::handle workspace, bool use_fp8_w8a8) {
    Call call("fused_experts");
    rk_fused_experts_args args{sizeof args};
    args.hidden_states = call.in("hidden_states", hidden_states);
    args.w1 = call.in("w1", w1);
    args.w2 = call.in("w2", w2);
    args.topk_weights = call.in("topk_weights", topk_weights);
    args.topk_ids = call.in("topk_ids", topk_ids);
    args.w1_scale = call.optional_in("w1_scale", w1_scale);
    args.w2_scale = call.optional_in("w2_scale", w2_scale);
    args.expert_map = call.optional_in("expert_map", expert_map);
    args.out = call.out("out", out);
    args.workspace = call.out("workspace", workspace);
    args.use_fp8_w8a8 = use_fp8_w8a8;
    call.run(rk_fused_experts, args);
  });
  m.def("fused_experts_mixed",
        [](py::handle hidden_states, py::handle w1, py::handle w2, py::handle bias1, py::handle bias2,
           py::handle topk_weights, py::handle topk_ids, py::handle expert_map, py::handle out, py::handle workspace,
           uint32_t kind, uint32_t group, bool zeros, const std::string& scale_dtype, int64_t inter_size,
           int activation, float alpha, float limit) {
          Call call("fused_experts_mixed");
          rk_fused_experts_mixed_args args{sizeof args};
          args.kind = kind;
          args.group = group;
          args.zeros = zeros;
          args.scale_dtype = dtype_named(scale_dtype);
          args.inter_size = inter_size;
          args.activation = activation;
          args.alpha = alpha;
          args.limit = limit;
          args.hidden_states = call.in("hidden_states", hidden_states);
          args.w1 = call.in("w1", w1);
          args.w2 = call.in("w2", w2);
          args.bias1 = call.optional_in("bias1", bias1);
          args.bias2 = call.optional_in("bias2", bias2);
          args.topk_weights = call.in("topk_weights", topk_weights);
          args.topk_ids = call.in("topk_ids", topk_ids);
          args.expert_map = call.optional_in("expert_map", expert_map);
          args.out = call.out("out", out);
          args.workspace = call.out("workspace", workspace);
          call.run(rk_fused_experts_mixed, args);
        });
  m.def("fused_experts_workspace_size",
        [](int64_t tokens, int64_t topk, int64_t named_experts, int64_t hidden_size, int64_t inter_size) {
          const rk_fused_experts_sizes sizes{sizeof sizes, tokens, topk, named_experts, hidden_size, inter_size};
          int64_t bytes = 0;
          if (const rk_status status = rk_fused_experts_workspace_size(&sizes, &bytes); status != RK_OK)
            raise(status, rk_last_error());
          return bytes;
        });
  const auto grouped = [](py::handle x, py::handle weight, py::handle groups, int expected_m, py::handle x_scale,
                          py::handle weight_scale, py::handle out, py::handle workspace) {
    Call call("m_grouped_gemm");
    rk_m_grouped_gemm_args args{sizeof args};
    args.expected_m = expected_m;
    args.x = call.in("x", x);
    args.weight = call.in("weight", weight);
    args.groups = call.in("groups", groups);
    args.x_scale = call.optional_in("x_scale", x_scale);
    args.weight_scale = call.optional_in("weight_scale", weight_scale);
    args.out = call.out("out", out);
    args.workspace = call.out("workspace", workspace);
    call.run(rk_m_grouped_gemm, args);
  };
  m.def("m_grouped_gemm_contiguous", grouped);
  m.def("m_grouped_gemm_masked", grouped);
  m.def("m_grouped_gemm_workspace_size", [](bool fp8, int64_t rows, int64_t groups, int64_t k) {
    const rk_m_grouped_gemm_sizes sizes{sizeof sizes, fp8, rows, groups, k};
    int64_t bytes = 0;
    if (const rk_status status = rk_m_grouped_gemm_workspace_size(&sizes, &bytes); status != RK_OK)
      raise(status, rk_last_error());
    return bytes;
  });
}

}  // namespace radix::bind
