#include "radix_kernels/persistent_decoder.h"

#include <vector>

#include "bindings/held.h"

namespace radix::bind {
namespace {

constexpr const char* kOp = "PersistentDecoder";

// The Python object `_bind.PersistentDecoder`; radix_kernels.PersistentDecoder is its public face.
class PersistentDecoder {
 public:
  // layers: tuples in the order of rk_persistent_layer.
  PersistentDecoder(const py::list& layers, py::handle final_norm, py::handle cos_sin_cache, int heads, int kv_heads,
                    float eps, float qk_eps, float softmax_scale, int top_k, bool renormalize) {
    for (const auto& each : layers) add(py::cast<py::tuple>(each));
    Call call(kOp);
    decoder_.layers = layers_.data();
    decoder_.num_layers = static_cast<int32_t>(layers_.size());
    decoder_.final_norm = keep_.device_tensor(call, "final_norm", final_norm);
    decoder_.cos_sin_cache = keep_.device_tensor(call, "cos_sin_cache", cos_sin_cache);
    decoder_.heads = heads;
    decoder_.kv_heads = kv_heads;
    decoder_.eps = eps;
    decoder_.qk_eps = qk_eps;
    decoder_.softmax_scale = softmax_scale;
    decoder_.top_k = top_k;
    decoder_.renormalize = renormalize;
    const rk_status status = rk_persistent_decoder_workspace_size(&decoder_, &bytes_, &max_tokens_);
    if (status) raise(status, rk_last_error());
  }

  int64_t workspace_size() const { return bytes_; }
  int max_tokens() const { return max_tokens_; }

  // workspace: kept; zero.
  void prepare(py::handle workspace) {
    Call call(kOp);
    call.out("workspace", workspace);
    decoder_.workspace = keep_.device_tensor(call, "workspace", workspace);
    call.run(rk_prepare_persistent_decoder, decoder_);
  }

  void run(py::handle hidden, py::handle positions, py::handle slot_mapping, py::handle page_table,
           py::handle kv_lens) const {
    Call call(kOp);
    rk_persistent_decoder_args args{sizeof args};
    args.decoder = &decoder_;
    args.hidden = call.out("hidden", hidden);
    args.positions = call.in("positions", positions);
    args.slot_mapping = call.in("slot_mapping", slot_mapping);
    args.page_table = call.in("page_table", page_table);
    args.kv_lens = call.in("kv_lens", kv_lens);
    call.run(rk_persistent_decode, args);
  }

 private:
  void add(const py::tuple& parts) {
    Call call(kOp);
    const auto tensor = [&](const char* name, size_t i) { return keep_.device_tensor(call, name, parts[i]); };
    rk_persistent_layer layer;
    layer.qkv = tensor("qkv", 0);
    layer.o = tensor("o", 1);
    layer.gate_up = tensor("gate_up", 2);
    layer.down = tensor("down", 3);
    layer.qkv_bias = tensor("qkv_bias", 4);
    layer.input_norm = tensor("input_norm", 5);
    layer.post_norm = tensor("post_norm", 6);
    layer.q_norm = tensor("q_norm", 7);
    layer.k_norm = tensor("k_norm", 8);
    layer.k_cache = tensor("k_cache", 9);
    layer.v_cache = tensor("v_cache", 10);
    layer.router = tensor("router", 11);
    layer.qkv_scale = tensor("qkv_scale", 12);
    layer.o_scale = tensor("o_scale", 13);
    layer.gate_up_scale = tensor("gate_up_scale", 14);
    layer.down_scale = tensor("down_scale", 15);
    layers_.push_back(layer);
  }

  rk_persistent_decoder decoder_{sizeof(rk_persistent_decoder)};
  std::vector<rk_persistent_layer> layers_;
  int64_t bytes_ = 0;
  int32_t max_tokens_ = 0;
  Keeper keep_;
};

}  // namespace

void bind_persistent_decoder(py::module_& m) {
  py::class_<PersistentDecoder>(m, "PersistentDecoder")
      .def(py::init<const py::list&, py::handle, py::handle, int, int, float, float, float, int, bool>())
      .def("workspace_size", &PersistentDecoder::workspace_size)
      .def("max_tokens", &PersistentDecoder::max_tokens)
      .def("prepare", &PersistentDecoder::prepare)
      .def("run", &PersistentDecoder::run);
}

}  // namespace radix::bind
