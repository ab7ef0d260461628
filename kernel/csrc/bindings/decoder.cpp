#include "radix_kernels/decoder.h"

#include <deque>
#include <vector>

#include "bindings/held.h"
#include "bindings/packed_experts.h"
#include "bindings/packed_heads.h"

namespace radix::bind {
namespace {

// (buffer, first column, columns)
rk_columns columns(py::handle place) {
  const auto parts = py::cast<py::tuple>(place);
  return {parts[0].cast<int32_t>(), parts[1].cast<int64_t>(), parts[2].cast<int64_t>()};
}

rk_dtype dtype_named(const std::string& name) {
  if (name == "bfloat16") return {RK_CODE_BFLOAT, 16, 1};
  if (name == "float16") return {RK_CODE_FLOAT, 16, 1};
  if (name == "float32") return {RK_CODE_FLOAT, 32, 1};
  if (name == "int32") return {RK_CODE_INT, 32, 1};
  raise(RK_DTYPE, ("decoder: no buffer can be " + name).c_str());
}

// The Python object `_bind.Decoder`; radix_kernels.Decoder is its public face, whose records call add_*.
class Decoder {
 public:
  // buffers: (columns, name of the dtype).
  explicit Decoder(const py::list& buffers) {
    for (const auto& each : buffers) {
      const auto buffer = py::cast<py::tuple>(each);
      buffers_.push_back({buffer[0].cast<int64_t>(), dtype_named(buffer[1].cast<std::string>())});
    }
    args_.buffers = buffers_.data();
    args_.num_buffers = static_cast<int32_t>(buffers_.size());
  }

  void add_rmsnorm(py::handle x, py::handle out, py::handle weight, float eps) {
    Call call("decoder");
    add(RK_OP_RMSNORM, norms_, {columns(x), columns(out), keep_.tensor(call, "weight", weight), eps});
  }

  // weight: (PackedDesc, data, bias or None).
  void add_linear(py::handle x, py::handle out, py::handle residual, const py::tuple& weight, int gate) {
    Call call("decoder");
    rk_linear_op op{columns(x), columns(out), columns(residual)};
    op.desc = keep_.desc(weight[0]);
    op.packed = keep_.tensor(call, "weight", weight[1]);
    op.bias = keep_.tensor(call, "bias", weight[2]);
    op.gate = gate ? RK_GATE_HALVES : RK_GATE_NONE;
    add(RK_OP_LINEAR, products_, op);
  }

  // places: of q, k, v; cache: k, v and their scales or None; tensors: norms of q and k or None, cos_sin_cache.
  void add_rope_store(const py::tuple& places, const py::tuple& cache, const py::tuple& tensors, float eps,
                      bool is_neox) {
    Call call("decoder");
    rk_rope_store_op op{columns(places[0]), columns(places[1]), columns(places[2]), layer_cache(call, cache)};
    op.q_norm = keep_.tensor(call, "q_norm", tensors[0]);
    op.k_norm = keep_.tensor(call, "k_norm", tensors[1]);
    op.cos_sin_cache = keep_.tensor(call, "cos_sin_cache", tensors[2]);
    op.eps = eps;
    op.is_neox = is_neox;
    add(RK_OP_ROPE_STORE, rope_stores_, op);
  }

  void add_attention(py::handle q, py::handle out, const py::tuple& cache, py::handle sinks, float softmax_scale,
                     float softcap, int window_left) {
    Call call("decoder");
    rk_attention_op op{columns(q), columns(out), layer_cache(call, cache), keep_.tensor(call, "sinks", sinks)};
    op.softmax_scale = softmax_scale;
    op.softcap = softcap;
    op.window_left = window_left;
    add(RK_OP_ATTENTION, attentions_, op);
  }

  void add_gated_activation(py::handle x, py::handle out, int activation) {
    add(RK_OP_GATED_ACTIVATION, activations_, {columns(x), columns(out), activation});
  }

  void add_add(int to, int x, py::handle scale, float factor) {
    add(RK_OP_ADD, sums_, {to, x, columns(scale), factor});
  }

  void add_scale(py::handle x, py::handle factors) {
    Call call("decoder");
    add(RK_OP_SCALE, scales_, {columns(x), keep_.tensor(call, "factors", factors)});
  }

  // places: of logits, weights, ids; groups: how many, and how many of them are chosen.
  void add_route(const py::tuple& places, py::handle bias, int router, bool renormalize, const py::tuple& groups,
                 float scaling) {
    Call call("decoder");
    rk_route_op op{columns(places[0]), columns(places[1]), columns(places[2]), keep_.tensor(call, "bias", bias)};
    op.router = router;
    op.renormalize = renormalize;
    op.groups = groups[0].cast<int32_t>();
    op.top_groups = groups[1].cast<int32_t>();
    op.scaling = scaling;
    add(RK_OP_ROUTE, routes_, op);
  }

  // places: of x, weights, ids, out; experts: a PackedExperts, which is kept; biases: two, or None; gating: number,
  // alpha, limit.
  void add_experts(const py::tuple& places, const py::object& experts, const py::tuple& biases,
                   const py::tuple& gating) {
    Call call("decoder");
    const auto& list = experts.cast<const PackedExperts&>().experts();
    kept_.push_back(experts);
    add(RK_OP_EXPERTS, experts_,
        {columns(places[0]), columns(places[1]), columns(places[2]), columns(places[3]), list.data(),
         static_cast<int32_t>(list.size()), keep_.tensor(call, "bias1", biases[0]),
         keep_.tensor(call, "bias2", biases[1]), gating_of(gating)});
  }

  // places: of q, latent, rope; tensors: the cache, cos_sin_cache.
  void add_latent_store(const py::tuple& places, int32_t heads, const py::tuple& tensors, bool is_neox) {
    Call call("decoder");
    add(RK_OP_LATENT_STORE, latent_stores_,
        {columns(places[0]), columns(places[1]), columns(places[2]), heads, keep_.tensor(call, "kv_cache", tensors[0]),
         keep_.tensor(call, "cos_sin_cache", tensors[1]), is_neox});
  }

  // places: of q, out; weights: two PackedHeads, which are kept, absorb and values.
  void add_latent_attention(const py::tuple& places, const py::tuple& weights, py::handle cache, float softmax_scale) {
    Call call("decoder");
    const auto& absorb = weights[0].cast<const PackedHeads&>().heads();
    const auto& values = weights[1].cast<const PackedHeads&>().heads();
    if (absorb.size() != values.size())
      raise(RK_INVALID, "decoder: absorb and values are weights of different numbers of heads");
    kept_.push_back(weights);
    add(RK_OP_LATENT_ATTENTION, latent_attentions_,
        {columns(places[0]), columns(places[1]), static_cast<int32_t>(absorb.size()), absorb.data(), values.data(),
         keep_.tensor(call, "kv_cache", cache), softmax_scale});
  }

  // places: of q, out; weight: (PackedDesc, data).
  void add_latent_prefill(const py::tuple& places, int32_t heads, const py::tuple& weight, py::handle cache,
                          float softmax_scale) {
    Call call("decoder");
    add(RK_OP_LATENT_PREFILL, latent_prefills_,
        {columns(places[0]), columns(places[1]), heads, keep_.desc(weight[0]), keep_.tensor(call, "expand", weight[1]),
         keep_.tensor(call, "kv_cache", cache), softmax_scale});
  }

  int64_t workspace_size(py::handle hidden, py::handle page_table, py::handle kv_lens, py::handle cu_seqlens_q,
                         int64_t max_seqlen_q, int64_t num_expanded) const {
    Call call("decoder");
    rk_decoder_args args = args_;
    args.hidden = call.in("hidden", hidden);
    args.page_table = call.in("page_table", page_table);
    args.kv_lens = call.in("kv_lens", kv_lens);
    args.cu_seqlens_q = call.in("cu_seqlens_q", cu_seqlens_q);
    args.max_seqlen_q = max_seqlen_q;
    args.num_expanded = num_expanded;
    int64_t bytes = 0;
    if (const rk_status status = rk_decoder_workspace_size(&args, &bytes)) raise(status, rk_last_error());
    return bytes;
  }

  void run(py::handle hidden, py::handle positions, py::handle slot_mapping, py::handle page_table, py::handle kv_lens,
           py::handle cu_seqlens_q, int64_t max_seqlen_q, int64_t num_expanded, py::handle workspace) const {
    Call call("decoder");
    rk_decoder_args args = args_;
    args.hidden = call.out("hidden", hidden);
    args.positions = call.in("positions", positions);
    args.slot_mapping = call.in("slot_mapping", slot_mapping);
    args.page_table = call.in("page_table", page_table);
    args.kv_lens = call.in("kv_lens", kv_lens);
    args.cu_seqlens_q = call.in("cu_seqlens_q", cu_seqlens_q);
    args.max_seqlen_q = max_seqlen_q;
    args.num_expanded = num_expanded;
    args.workspace = call.out("workspace", workspace);
    call.run(rk_decoder, args);
  }

 private:
  rk_layer_cache layer_cache(Call& call, const py::tuple& parts) {
    return {keep_.tensor(call, "k_cache", parts[0]), keep_.tensor(call, "v_cache", parts[1]),
            keep_.tensor(call, "k_scale", parts[2]), keep_.tensor(call, "v_scale", parts[3])};
  }

  // records: of one kind, which do not move when others follow.
  template <class Record>
  void add(rk_decoder_op_kind kind, std::deque<Record>& records, const std::common_type_t<Record>& record) {
    ops_.push_back({kind, &records.emplace_back(record)});
    args_.ops = ops_.data();
    args_.num_ops = static_cast<int64_t>(ops_.size());
  }

  rk_decoder_args args_{sizeof(rk_decoder_args)};  // what all calls share
  std::vector<rk_decoder_buffer> buffers_;
  std::vector<rk_decoder_op> ops_;
  std::deque<rk_rmsnorm_op> norms_;
  std::deque<rk_linear_op> products_;
  std::deque<rk_rope_store_op> rope_stores_;
  std::deque<rk_attention_op> attentions_;
  std::deque<rk_gated_activation_op> activations_;
  std::deque<rk_add_op> sums_;
  std::deque<rk_scale_op> scales_;
  std::deque<rk_route_op> routes_;
  std::deque<rk_experts_op> experts_;
  std::deque<rk_latent_store_op> latent_stores_;
  std::deque<rk_latent_attention_op> latent_attentions_;
  std::deque<rk_latent_prefill_op> latent_prefills_;
  Keeper keep_;
  std::vector<py::object> kept_;
};

}  // namespace

void bind_decoder(py::module_& m) {
  py::class_<Decoder>(m, "Decoder")
      .def(py::init<const py::list&>())
      .def("add_rmsnorm", &Decoder::add_rmsnorm)
      .def("add_linear", &Decoder::add_linear)
      .def("add_rope_store", &Decoder::add_rope_store)
      .def("add_attention", &Decoder::add_attention)
      .def("add_gated_activation", &Decoder::add_gated_activation)
      .def("add_add", &Decoder::add_add)
      .def("add_scale", &Decoder::add_scale)
      .def("add_route", &Decoder::add_route)
      .def("add_experts", &Decoder::add_experts)
      .def("add_latent_store", &Decoder::add_latent_store)
      .def("add_latent_attention", &Decoder::add_latent_attention)
      .def("add_latent_prefill", &Decoder::add_latent_prefill)
      .def("workspace_size", &Decoder::workspace_size)
      .def("run", &Decoder::run);
}

}  // namespace radix::bind
