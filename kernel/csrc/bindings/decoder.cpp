#include "radix_kernels/decoder.h"

#include <vector>

#include "bindings/held.h"

namespace radix::bind {
namespace {

// The Python object `_bind.Decoder`; radix_kernels.DenseDecoder is its public face.
class Decoder {
 public:
  Decoder(py::handle norm, py::handle table, float eps, float scale, int activation) {
    Call call("decoder");
    args_.norm = keep_.tensor(call, "norm", norm);
    args_.cos_sin_cache = keep_.tensor(call, "cos_sin_cache", table);
    args_.eps = eps;
    args_.softmax_scale = scale;
    args_.activation = activation;
  }

  // Products are (PackedDesc, data, bias or None).
  void add_layer(py::handle input_norm, py::handle post_norm, py::handle q_norm, py::handle k_norm, py::tuple qkv,
                 py::tuple o, py::tuple gate_up, py::tuple down, py::handle k_cache, py::handle v_cache, int left) {
    Call call("decoder");
    rk_decoder_layer layer{};
    layer.input_norm = keep_.tensor(call, "input_norm", input_norm);
    layer.post_norm = keep_.tensor(call, "post_norm", post_norm);
    layer.q_norm = keep_.tensor(call, "q_norm", q_norm);
    layer.k_norm = keep_.tensor(call, "k_norm", k_norm);
    layer.qkv = product(call, "qkv", qkv);
    layer.o = product(call, "o", o);
    layer.gate_up = product(call, "gate_up", gate_up);
    layer.down = product(call, "down", down);
    layer.k_cache = keep_.tensor(call, "k_cache", k_cache);
    layer.v_cache = keep_.tensor(call, "v_cache", v_cache);
    layer.window_left = left;
    layers_.push_back(layer);
    args_.layers = layers_.data();
    args_.num_layers = static_cast<int32_t>(layers_.size());
  }

  int64_t workspace_size(py::handle hidden, py::handle page_table, int64_t max_seqlen_q) const {
    Call call("decoder");
    rk_decoder_args args = args_;
    args.hidden = call.in("hidden", hidden);
    args.page_table = call.in("page_table", page_table);
    args.max_seqlen_q = max_seqlen_q;
    int64_t bytes = 0;
    if (const rk_status status = rk_decoder_workspace_size(&args, &bytes)) raise(status, rk_last_error());
    return bytes;
  }

  void run(py::handle hidden, py::handle positions, py::handle slot_mapping, py::handle page_table, py::handle kv_lens,
           py::handle cu_seqlens_q, int64_t max_seqlen_q, py::handle workspace) const {
    Call call("decoder");
    rk_decoder_args args = args_;
    args.hidden = call.out("hidden", hidden);
    args.positions = call.in("positions", positions);
    args.slot_mapping = call.in("slot_mapping", slot_mapping);
    args.page_table = call.in("page_table", page_table);
    args.kv_lens = call.in("kv_lens", kv_lens);
    args.cu_seqlens_q = call.in("cu_seqlens_q", cu_seqlens_q);
    args.max_seqlen_q = max_seqlen_q;
    args.workspace = call.out("workspace", workspace);
    call.run(rk_decoder, args);
  }

 private:
  rk_decoder_linear product(Call& call, const char* name, const py::tuple& parts) {
    return {keep_.desc(parts[0]), keep_.tensor(call, name, parts[1]), keep_.tensor(call, "bias", parts[2])};
  }

  rk_decoder_args args_{sizeof(rk_decoder_args)};  // what all calls share
  std::vector<rk_decoder_layer> layers_;
  Keeper keep_;
};

}  // namespace

void bind_decoder(py::module_& m) {
  py::class_<Decoder>(m, "Decoder")
      .def(py::init<py::handle, py::handle, float, float, int>())
      .def("add_layer", &Decoder::add_layer)
      .def("workspace_size", &Decoder::workspace_size)
      .def("run", &Decoder::run);
}

}  // namespace radix::bind
