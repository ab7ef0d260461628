#include "radix_kernels/decoder.h"

#include <vector>

#include "bindings/held.h"

namespace radix::bind {
namespace {

// The Python object `_bind.Decoder`; radix_kernels.DenseDecoder is its public face.
class Decoder {
 public:
  Decoder(py::handle norm, float eps, int activation) {
    Call call("decoder");
    args_.norm = keep_.tensor(call, "norm", norm);
    args_.eps = eps;
    args_.activation = activation;
  }

  // Norms are (before attention, behind it, before the MLP, behind it, of q, of k), products (PackedDesc, data, bias or
  // None) of qkv, o, gate_up and down, the cache (k, v, scales of k, of v).
  void add_layer(const py::tuple& norms, const py::tuple& products, const py::tuple& cache, py::handle cos_sin_cache,
                 py::handle sinks, float softmax_scale, float softcap, int window_left, bool is_neox) {
    Call call("decoder");
    rk_decoder_layer layer{};
    layer.attention_norm = keep_.tensor(call, "attention_norm", norms[0]);
    layer.attention_out_norm = keep_.tensor(call, "attention_out_norm", norms[1]);
    layer.mlp_norm = keep_.tensor(call, "mlp_norm", norms[2]);
    layer.mlp_out_norm = keep_.tensor(call, "mlp_out_norm", norms[3]);
    layer.q_norm = keep_.tensor(call, "q_norm", norms[4]);
    layer.k_norm = keep_.tensor(call, "k_norm", norms[5]);
    layer.qkv = product(call, "qkv", products[0]);
    layer.o = product(call, "o", products[1]);
    layer.gate_up = product(call, "gate_up", products[2]);
    layer.down = product(call, "down", products[3]);
    layer.k_cache = keep_.tensor(call, "k_cache", cache[0]);
    layer.v_cache = keep_.tensor(call, "v_cache", cache[1]);
    layer.k_scale = keep_.tensor(call, "k_scale", cache[2]);
    layer.v_scale = keep_.tensor(call, "v_scale", cache[3]);
    layer.cos_sin_cache = keep_.tensor(call, "cos_sin_cache", cos_sin_cache);
    layer.sinks = keep_.tensor(call, "sinks", sinks);
    layer.softmax_scale = softmax_scale;
    layer.softcap = softcap;
    layer.window_left = window_left;
    layer.is_neox = is_neox;
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
      .def(py::init<py::handle, float, int>())
      .def("add_layer", &Decoder::add_layer)
      .def("workspace_size", &Decoder::workspace_size)
      .def("run", &Decoder::run);
}

}  // namespace radix::bind
