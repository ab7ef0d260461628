#include "radix_kernels/sampling_shards.h"

#include <pybind11/stl.h>

#include "bindings/sampling_args.h"

namespace radix::bind {

void bind_sampling_shards(py::module_& m) {
  m.def("sampling_candidates",
        [](py::handle logits, py::handle temperature, py::handle top_k, py::handle top_p, py::handle min_p,
           py::handle seed, py::handle position, uint32_t stream, int64_t first_id, int64_t vocab_size,
           py::handle records, py::handle workspace, std::optional<py::tuple> edits) {
          Call call("sampling_candidates");
          rk_sampling_candidates_args args{sizeof args};
          args.first_id = first_id;
          args.vocab_size = vocab_size;
          args.logits = call.in("logits", logits);
          read_settings(call, args, stream, temperature, top_k, top_p, min_p, seed, position);
          args.records = call.out("records", records);
          args.workspace = call.optional_out("workspace", workspace);
          if (edits) read_edits(call, *edits, args);
          call.run(rk_sampling_candidates, args);
        });
  m.def("sample_candidates",
        [](py::handle records, py::handle temperature, py::handle top_k, py::handle top_p, py::handle min_p,
           py::handle seed, py::handle position, uint32_t stream, int64_t vocab_size, py::handle out) {
          Call call("sample_candidates");
          rk_sample_candidates_args args{sizeof args};
          args.vocab_size = vocab_size;
          args.records = call.in("records", records);
          read_settings(call, args, stream, temperature, top_k, top_p, min_p, seed, position);
          args.out = call.out("out", out);
          call.run(rk_sample_candidates, args);
        });
}

}  // namespace radix::bind
