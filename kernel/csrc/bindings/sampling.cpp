#include "radix_kernels/sampling.h"

#include <pybind11/stl.h>

#include "bindings/sampling_args.h"

namespace radix::bind {
void bind_sampling(py::module_& m) {
  m.def("apply_penalties_inplace", [](py::handle logits, py::handle counts, py::handle slots, py::handle repetition,
                                      py::handle frequency, py::handle presence) {
    Call call("apply_penalties_inplace");
    rk_apply_penalties_args args{sizeof args};
    args.logits = call.out("logits", logits);
    args.counts = call.in("counts", counts);
    args.slots = call.in("slots", slots);
    args.repetition = call.in("repetition", repetition);
    args.frequency = call.in("frequency", frequency);
    args.presence = call.in("presence", presence);
    call.run(rk_apply_penalties, args);
  });
  m.def("count_tokens_inplace", [](py::handle counts, py::handle slots, py::handle ids) {
    Call call("count_tokens_inplace");
    rk_count_tokens_args args{sizeof args};
    args.counts = call.out("counts", counts);
    args.slots = call.in("slots", slots);
    args.ids = call.in("ids", ids);
    call.run(rk_count_tokens, args);
  });
  m.def("sampling_workspace_size", [](int64_t rows, int64_t columns) {
    const rk_sampling_sizes sizes{sizeof sizes, rows, columns};
    int64_t bytes = 0;
    if (const rk_status status = rk_sampling_workspace_size(&sizes, &bytes); status != RK_OK)
      raise(status, rk_last_error());
    return bytes;
  });
  m.def("top_k_top_p_sampling",
        [](py::handle logits, py::handle temperature, py::handle top_k, py::handle top_p, py::handle min_p,
           py::handle seed, py::handle position, uint32_t stream, py::handle out, py::handle workspace,
           std::optional<py::tuple> edits, std::optional<py::tuple> logprobs) {
          Call call("top_k_top_p_sampling");
          rk_top_k_top_p_sampling_args args{sizeof args};
          args.logits = call.in("logits", logits);
          read_settings(call, args, stream, temperature, top_k, top_p, min_p, seed, position);
          args.out = call.out("out", out);
          args.workspace = call.optional_out("workspace", workspace);
          if (edits) read_edits(call, *edits, args);
          if (logprobs) {
            args.logprob = call.out("logprob", (*logprobs)[0]);
            args.top_logprobs = call.out("top_logprobs", (*logprobs)[1]);
            args.top_ids = call.out("top_ids", (*logprobs)[2]);
          }
          call.run(rk_top_k_top_p_sampling, args);
        });
  m.def("token_logprobs", [](py::handle logits, py::handle ids, py::handle logprob, py::handle top_logprobs,
                             py::handle top_ids, py::handle workspace) {
    Call call("token_logprobs");
    rk_token_logprobs_args args{sizeof args};
    args.logits = call.in("logits", logits);
    args.ids = call.in("ids", ids);
    args.logprob = call.out("logprob", logprob);
    args.top_logprobs = call.out("top_logprobs", top_logprobs);
    args.top_ids = call.out("top_ids", top_ids);
    args.workspace = call.optional_out("workspace", workspace);
    call.run(rk_token_logprobs, args);
  });
}

}  // namespace radix::bind
