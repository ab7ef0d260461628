#include "radix_kernels/step.h"

#include "bindings/exchange.h"

namespace radix::bind {

void bind_step(py::module_& m) {
  m.def("fill_step_tensors",
        [](py::handle entries, py::handle tokens, py::handle sample_tokens, py::handle next_token,
           py::handle committed_len, py::handle row_pages, int32_t page_size, py::handle kv_lens, py::handle input_ids,
           py::handle positions, py::handle slot_mapping, py::handle page_table, py::handle sample_positions) {
          Call call("fill_step_tensors");
          rk_fill_step_tensors_args args{sizeof args};
          args.page_size = page_size;
          args.entries = call.in("entries", entries);
          args.tokens = call.in("tokens", tokens);
          args.sample_tokens = call.in("sample_tokens", sample_tokens);
          args.next_token = call.in("next_token", next_token);
          args.committed_len = call.out("committed_len", committed_len);
          args.row_pages = call.in("row_pages", row_pages);
          args.kv_lens = call.out("kv_lens", kv_lens);
          args.input_ids = call.out("input_ids", input_ids);
          args.positions = call.out("positions", positions);
          args.slot_mapping = call.out("slot_mapping", slot_mapping);
          args.page_table = call.out("page_table", page_table);
          args.sample_positions = call.out("sample_positions", sample_positions);
          call.run(rk_fill_step_tensors, args);
        });
  m.def("accept_tokens",
        [](py::handle ids, py::handle rows, py::handle grow_rows, py::handle next_token, py::handle committed_len,
           py::handle cu_samples, py::handle drafts, bool all_drawn, py::handle counts) {
          Call call("accept_tokens");
          rk_accept_tokens_args args{sizeof args};
          args.all_drawn = all_drawn;
          args.ids = call.in("ids", ids);
          args.rows = call.in("rows", rows);
          args.grow_rows = call.in("grow_rows", grow_rows);
          args.next_token = call.out("next_token", next_token);
          args.committed_len = call.out("committed_len", committed_len);
          args.cu_samples = call.optional_in("cu_samples", cu_samples);
          args.drafts = call.optional_in("drafts", drafts);
          args.counts = call.optional_out("counts", counts);
          call.run(rk_accept_tokens, args);
        });
}

}  // namespace radix::bind
