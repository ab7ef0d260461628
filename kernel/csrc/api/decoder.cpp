// Decoder: the entries of the other families, one after the other, over memory cut from the caller's workspace.
#include "radix_kernels/decoder.h"

#include "api/decoder.h"
#include "common/tensor.h"
#include "radix_kernels/activation.h"
#include "radix_kernels/attention.h"
#include "radix_kernels/fused_rope.h"
#include "radix_kernels/library.h"
#include "radix_kernels/norm.h"

using namespace radix;

namespace {

constexpr int64_t kAlign = 256;

// The status of an entry that was called from here; its text is already a full sentence.
void check(rk_status status) {
  if (status != RK_OK) fail(status, "%s", std::string(rk_last_error()).c_str());
}

// A tensor in the workspace, contiguous but for its rows, which may stand `row_step` elements apart.
class Made {
 public:
  Made(const rk_tensor& like, char* data, std::initializer_list<int64_t> sizes, int64_t row_step = 0) : tensor_(like) {
    tensor_.data = data;
    tensor_.byte_offset = 0;
    tensor_.ndim = static_cast<int>(sizes.size());
    std::copy(sizes.begin(), sizes.end(), shape_);
    int64_t step = 1;
    for (int i = tensor_.ndim - 1; i >= 0; step *= shape_[i--]) strides_[i] = step;
    if (row_step) strides_[0] = row_step;
    tensor_.shape = shape_;
    tensor_.strides = strides_;
  }
  Made(const Made&) = delete;
  Made& operator=(const Made&) = delete;

  char* data() const { return static_cast<char*>(tensor_.data); }
  operator const rk_tensor*() const { return &tensor_; }

 private:
  rk_tensor tensor_;
  int64_t shape_[3], strides_[3];
};

// Where everything lies: sizes in elements from the first layer's weights, offsets in bytes.
struct Plan {
  int64_t tokens, hidden, heads, kv_heads, dim, inner, item;
  int64_t residual, qkv, attended, gate_up, gated, out, attention, attention_bytes, bytes;

  explicit Plan(const rk_decoder_args& a) {
    const char* op = "decoder";
    if (a.num_layers < 1 || !a.layers) fail(RK_INVALID, "%s: there are no layers", op);
    const rk_decoder_layer& layer = a.layers[0];
    const Arg x(op, "hidden", a.hidden), k_cache(op, "k_cache", layer.k_cache), table(op, "page_table", a.page_table);
    x.backend_device().dtype(kFloats).ndim(2).contiguous().writable();
    if (x->device.type != RK_DEVICE_CPU) x.reject(RK_UNSUPPORTED, "is on a GPU, this op runs on the CPU");
    if (k_cache.type() != DType::i8) k_cache.same_dtype(x);
    k_cache.ndim(4);
    table.ndim(2);
    if (!layer.o.desc || !layer.down.desc) fail(RK_INVALID, "%s: a weight of the first layer is missing", op);
    tokens = x.size(0), hidden = x.size(1), item = element_size(*x);
    kv_heads = k_cache.size(2), dim = k_cache.size(3);
    if (dim < 1 || layer.o.desc->k % dim != 0)
      fail(RK_INVALID, "%s: o has %lld inputs, expected a multiple of the head dimension %lld", op,
           (long long)layer.o.desc->k, (long long)dim);
    heads = layer.o.desc->k / dim;
    inner = layer.down.desc->k;
    int64_t at = 0;
    const auto take = [&](int64_t columns) {
      const int64_t begin = at;
      at += (tokens * columns * item + kAlign - 1) / kAlign * kAlign;
      return begin;
    };
    residual = take(hidden);
    qkv = take((heads + 2 * kv_heads) * dim);
    attended = take(heads * dim);
    gate_up = take(2 * inner);
    gated = take(inner);
    out = take(hidden);
    rk_flash_attn_sizes sizes{sizeof sizes, tokens,          table.size(0), heads,         kv_heads,
                              dim,          k_cache.size(1), table.size(1), a.max_seqlen_q};
    int64_t extra = 0;
    check(rk_flash_attn_workspace_size(&sizes, &extra));
    attention = at;
    attention_bytes = extra;
    bytes = at + extra + kAlign;  // the caller's memory may begin anywhere
  }
};

// One call: the step's tensors and what runs on them.
class Decoder {
 public:
  Decoder(const rk_decoder_args& args, const Plan& plan, char* memory)
      : a_(args),
        p_(plan),
        residual_(*a_.hidden, memory + p_.residual, {p_.tokens, p_.hidden}),
        qkv_(*a_.hidden, memory + p_.qkv, {p_.tokens, qkv_columns()}),
        q_(*a_.hidden, memory + p_.qkv, {p_.tokens, p_.heads, p_.dim}, qkv_columns()),
        k_(*a_.hidden, memory + p_.qkv + p_.heads * p_.dim * p_.item, {p_.tokens, p_.kv_heads, p_.dim}, qkv_columns()),
        v_(*a_.hidden, memory + p_.qkv + (p_.heads + p_.kv_heads) * p_.dim * p_.item, {p_.tokens, p_.kv_heads, p_.dim},
           qkv_columns()),
        attended_(*a_.hidden, memory + p_.attended, {p_.tokens, p_.heads, p_.dim}),
        flat_(*a_.hidden, memory + p_.attended, {p_.tokens, p_.heads * p_.dim}),
        gate_up_(*a_.hidden, memory + p_.gate_up, {p_.tokens, 2 * p_.inner}),
        gated_(*a_.hidden, memory + p_.gated, {p_.tokens, p_.inner}),
        out_(*a_.hidden, memory + p_.out, {p_.tokens, p_.hidden}),
        space_(bytes_like(*a_.hidden), memory + p_.attention, {p_.attention_bytes}) {}

  // The embeddings are the first residual.
  void run() {
    std::memcpy(residual_.data(), data_ptr<char>(*a_.hidden), p_.tokens * p_.hidden * p_.item);
    for (int i = 0; i < a_.num_layers; i++) {
      const rk_decoder_layer& layer = a_.layers[i];
      linear(layer.qkv, normed(layer.attention_norm), qkv_);
      rope_and_store(layer);
      attend(layer);
      add(layer.o, flat_, layer.attention_out_norm);
      gate_and_up(layer.gate_up, normed(layer.mlp_norm));
      add(layer.down, gated_, layer.mlp_out_norm);
    }
    norm(residual_, a_.norm, a_.hidden);
  }

 private:
  int64_t qkv_columns() const { return (p_.heads + 2 * p_.kv_heads) * p_.dim; }

  static rk_tensor bytes_like(const rk_tensor& tensor) {
    rk_tensor t = tensor;
    t.dtype = {RK_CODE_UINT, 8, 1};
    return t;
  }

  void norm(const rk_tensor* x, const rk_tensor* weight, const rk_tensor* out) {
    check_status(rk_rmsnorm, rk_rmsnorm_args{sizeof(rk_rmsnorm_args), a_.eps, x, weight, out});
  }

  // The input of a block: the residual, normed where there is a weight.
  const rk_tensor* normed(const rk_tensor* weight) {
    if (!weight) return residual_;
    norm(residual_, weight, a_.hidden);
    return a_.hidden;
  }

  // residual += x W^T + bias, or += the norm of that.
  void add(const rk_decoder_linear& weight, const rk_tensor* x, const rk_tensor* out_norm) {
    if (!out_norm) return linear(weight, x, residual_, RK_GATE_NONE, residual_);
    linear(weight, x, a_.hidden);
    norm(a_.hidden, out_norm, out_);
    backend::decoder_add(*static_cast<const rk_tensor*>(residual_), *static_cast<const rk_tensor*>(out_));
  }

  void linear(const rk_decoder_linear& weight, const rk_tensor* x, const rk_tensor* out, int32_t gate = RK_GATE_NONE,
              const rk_tensor* residual = nullptr) {
    rk_linear_args args{sizeof args};
    args.desc = weight.desc;
    args.x = x;
    args.packed = weight.packed;
    args.bias = weight.bias;
    args.residual = residual;
    args.out = out;
    args.gate = gate;
    check_status(rk_linear, args);
  }

  void rope_and_store(const rk_decoder_layer& layer) {
    rk_fused_qk_norm_rope_store_args args{sizeof args, a_.eps, layer.is_neox};
    args.q = q_;
    args.k = k_;
    args.v = v_;
    args.q_weight = layer.q_norm;
    args.k_weight = layer.k_norm;
    args.cos_sin_cache = layer.cos_sin_cache;
    args.positions = a_.positions;
    args.k_cache = layer.k_cache;
    args.v_cache = layer.v_cache;
    args.slot_mapping = a_.slot_mapping;
    args.k_scale = layer.k_scale;
    args.v_scale = layer.v_scale;
    check_status(rk_fused_qk_norm_rope_store, args);
  }

  void attend(const rk_decoder_layer& layer) {
    rk_flash_attn_with_kvcache_args args{sizeof args};
    args.options = {layer.softmax_scale, layer.softcap, /*causal=*/1, layer.window_left, -1};
    args.sinks = layer.sinks;
    args.q = q_;
    args.k_cache = layer.k_cache;
    args.v_cache = layer.v_cache;
    args.page_table = a_.page_table;
    args.kv_lens = a_.kv_lens;
    args.cu_seqlens_q = a_.cu_seqlens_q;
    args.k_scale = layer.k_scale;
    args.v_scale = layer.v_scale;
    args.out = attended_;
    args.workspace = p_.attention_bytes > 0 ? static_cast<const rk_tensor*>(space_) : nullptr;
    args.max_seqlen_q = a_.max_seqlen_q;
    check_status(rk_flash_attn_with_kvcache, args);
  }

  void gate_and_up(const rk_decoder_linear& weight, const rk_tensor* x) {
    const bool fused = a_.activation == RK_ACTIVATION_SILU && !weight.bias && p_.inner % 16 == 0;
    if (fused) return linear(weight, x, gated_, RK_GATE_HALVES);
    linear(weight, x, gate_up_);
    activate();
  }

  void activate() {
    const rk_gated_activation_args args{sizeof args, gate_up_, gated_};
    switch (a_.activation) {
      case RK_ACTIVATION_SILU: return check_status(rk_silu_and_mul, args);
      case RK_ACTIVATION_GELU: return check_status(rk_gelu_and_mul, args);
      case RK_ACTIVATION_GELU_TANH: return check_status(rk_gelu_tanh_and_mul, args);
      default: fail(RK_INVALID, "decoder: activation is %d, expected 0, 1 or 2", a_.activation);
    }
  }

  template <class Args>
  static void check_status(rk_status (*entry)(const Args*, rk_stream), const Args& args) {
    check(entry(&args, 0));
  }

  const rk_decoder_args& a_;
  const Plan& p_;
  const Made residual_, qkv_, q_, k_, v_;
  const Made attended_, flat_, gate_up_, gated_, out_, space_;
};

}  // namespace

rk_status rk_decoder(const rk_decoder_args* args, rk_stream) {
  return guard([&] {
    const char* op = "decoder";
    const auto a = read_args(op, args);
    const Plan plan(a);
    const Arg workspace(op, "workspace", a.workspace);
    workspace.backend_device().dtype({DType::u8}).ndim(1).contiguous().writable();
    if (workspace.size(0) < plan.bytes)
      workspace.reject(RK_INVALID, "has %lld bytes, expected at least %lld", (long long)workspace.size(0),
                       (long long)plan.bytes);
    if (plan.tokens == 0) return;
    const auto begin = reinterpret_cast<uintptr_t>(data_ptr<char>(*workspace));
    Decoder(a, plan, reinterpret_cast<char*>((begin + kAlign - 1) / kAlign * kAlign)).run();
  });
}

rk_status rk_decoder_workspace_size(const rk_decoder_args* args, int64_t* bytes) {
  return guard([&] {
    const char* op = "decoder_workspace_size";
    if (!bytes) fail(RK_INVALID, "%s: bytes is required", op);
    *bytes = Plan(read_args(op, args)).bytes;
  });
}
