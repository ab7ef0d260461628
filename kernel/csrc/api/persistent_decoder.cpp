// Persistent decoder: checks, then the backend's kernel.
#include "api/persistent_decoder.h"

#include "common/check.h"

using namespace radix;

namespace {

constexpr int kHeadDim = 128;
constexpr int64_t kAlign = 16;   // bytes of an access
constexpr int64_t kBlock = 128;  // rows and columns that share a scale

void require_aligned(const Arg& arg) {
  const auto address = reinterpret_cast<uintptr_t>(arg->data) + arg->byte_offset;
  if (address % kAlign) arg.reject(RK_UNSUPPORTED, "does not begin at a multiple of 16 bytes");
}

// Checks tensors of one layer against the sizes that the decoder has.
class LayerCheck {
 public:
  LayerCheck(const char* op, const rk_persistent_decoder& decoder)
      : op_(op), decoder_(decoder), norm_(op, "final_norm", decoder.final_norm) {
    norm_.backend_device().dtype({DType::bf16}).ndim(1).contiguous();
    require_aligned(norm_);
  }

  void run(const rk_persistent_layer& layer) const {
    const int64_t hidden = norm_.size(0), heads = decoder_.heads, all = heads + 2 * decoder_.kv_heads;
    cache("k_cache", layer.k_cache);
    cache("v_cache", layer.v_cache);
    weight("qkv", layer.qkv, layer.qkv_scale, {all * kHeadDim, hidden});
    weight("o", layer.o, layer.o_scale, {hidden, heads * kHeadDim});
    mlp(layer, hidden);
    vector("input_norm", layer.input_norm, DType::bf16, hidden);
    vector("post_norm", layer.post_norm, DType::bf16, hidden);
    if (layer.qkv_bias) vector("qkv_bias", layer.qkv_bias, DType::bf16, all * kHeadDim);
    if (!layer.q_norm != !layer.k_norm) fail(RK_INVALID, "%s: q_norm and k_norm go together", op_);
    if (layer.q_norm) vector("q_norm", layer.q_norm, DType::f32, kHeadDim);
    if (layer.k_norm) vector("k_norm", layer.k_norm, DType::f32, kHeadDim);
  }

 private:
  void mlp(const rk_persistent_layer& layer, int64_t hidden) const {
    const rk_persistent_layer& first = decoder_.layers[0];
    if (!layer.router != !first.router)
      fail(RK_UNSUPPORTED, "%s: a mixture of experts in all layers or in none is served", op_);
    const Arg down(op_, "down", layer.down);
    if (!layer.router) {
      weight("down", layer.down, layer.down_scale, {hidden, -1});
      weight("gate_up", layer.gate_up, layer.gate_up_scale, {2 * down.size(1), hidden});
    } else {
      const Arg router = matrix("router", layer.router, DType::bf16, {-1, hidden});
      weight("down", layer.down, layer.down_scale, {router.size(0), hidden, -1});
      weight("gate_up", layer.gate_up, layer.gate_up_scale, {router.size(0), 2 * down.size(2), hidden});
      router.same_shape(Arg(op_, "the first router", first.router));
      if (decoder_.top_k < 1 || decoder_.top_k > router.size(0))
        fail(RK_INVALID, "%s: top_k is %d of %ld experts", op_, decoder_.top_k, router.size(0));
    }
    if (down.size(-1) != first.down->shape[first.down->ndim - 1])
      down.reject(RK_INVALID, "has another width than the first layer's");
  }

  // bf16, or E4M3 with scales.
  void weight(const char* name, const rk_tensor* tensor, const rk_tensor* scale,
              std::initializer_list<int64_t> shape) const {
    const bool scaled = decoder_.layers[0].qkv_scale != nullptr;
    if (!scale == scaled) fail(RK_UNSUPPORTED, "%s: %s: scales of all weights or of none are served", op_, name);
    const Arg arg = matrix(name, tensor, scaled ? DType::f8e4m3 : DType::bf16, shape);
    if (!scaled) return;
    const Arg scales(op_, "the scales of a weight", scale);
    scales.same_device(norm_).dtype({DType::f32}).ndim(arg->ndim).contiguous();
    for (int i = 0; i < arg->ndim; i++) {
      const int64_t unit = i < arg->ndim - 2 ? 1 : kBlock;
      if (arg.size(i) % unit) arg.reject(RK_UNSUPPORTED, "has sizes that are no multiples of 128, as blocks are");
      if (scales.size(i) * unit != arg.size(i)) scales.reject(RK_INVALID, "have another shape than its blocks");
    }
  }
  Arg matrix(const char* name, const rk_tensor* tensor, DType type, std::initializer_list<int64_t> shape) const {
    const Arg arg(op_, name, tensor);
    arg.same_device(norm_).dtype({type}).shape(shape, "the decoder's sizes").contiguous();
    require_aligned(arg);
    return arg;
  }
  void vector(const char* name, const rk_tensor* tensor, DType type, int64_t size) const {
    const Arg arg(op_, name, tensor);
    arg.same_device(norm_).dtype({type}).shape({size}, "the decoder's sizes").contiguous();
    require_aligned(arg);
  }
  void cache(const char* name, const rk_tensor* tensor) const {
    const Arg arg(op_, name, tensor), first(op_, "the first k_cache", decoder_.layers[0].k_cache);
    arg.same_device(norm_).dtype({DType::bf16}).ndim(4).same_shape(first).last_contiguous();
    arg.shape({-1, -1, decoder_.kv_heads, -1}, "pages, page_size, kv_heads, head_dim");
    if (arg.size(3) != kHeadDim) arg.reject(RK_UNSUPPORTED, "has heads of %ld, the kernel serves 128", arg.size(3));
    for (int i = 0; i < 3; i++)
      if (arg.stride(i) != first.stride(i)) arg.reject(RK_INVALID, "has other strides than the first k_cache");
    for (int i = 0; i < 3; i++)
      if (arg.stride(i) * 2 % kAlign) arg.reject(RK_UNSUPPORTED, "has strides that are no multiples of 16 bytes");
    require_aligned(arg);
  }

  const char* op_;
  const rk_persistent_decoder& decoder_;
  const Arg norm_;
};

rk_persistent_decoder checked(const char* op, const rk_persistent_decoder* given) {
  const auto decoder = read_args(op, given);
  if (decoder.num_layers < 1 || !decoder.layers) fail(RK_INVALID, "%s: there are no layers", op);
  if (decoder.kv_heads < 1 || decoder.heads < decoder.kv_heads || decoder.heads % decoder.kv_heads)
    fail(RK_INVALID, "%s: %d heads are no multiple of %d KV heads", op, decoder.heads, decoder.kv_heads);
  const LayerCheck check(op, decoder);
  if (!decoder.layers[0].down || !decoder.layers[0].k_cache) fail(RK_INVALID, "%s: the first layer is not whole", op);
  for (int i = 0; i < decoder.num_layers; i++) check.run(decoder.layers[i]);
  if (!decoder.layers[0].router && decoder.top_k) fail(RK_INVALID, "%s: top_k without a router", op);
  const Arg table(op, "cos_sin_cache", decoder.cos_sin_cache), norm(op, "final_norm", decoder.final_norm);
  table.same_device(norm).dtype({DType::f32}).shape({-1, kHeadDim}, "positions, head_dim").contiguous();
  if (table.size(0) < 1) table.reject(RK_INVALID, "has no positions");
  return decoder;
}

int tokens_served(const char* op, const rk_persistent_decoder& decoder, backend::PersistentDecoderNeeds* needs) {
  *needs = backend::persistent_decoder_needs(decoder);
  if (needs->max_tokens < 1) fail(RK_UNSUPPORTED, "%s: no kernel of this GPU serves layers of these sizes", op);
  return needs->max_tokens;
}

void check_workspace(const char* op, const rk_persistent_decoder& decoder, int64_t bytes) {
  const Arg workspace(op, "workspace", decoder.workspace), norm(op, "final_norm", decoder.final_norm);
  workspace.same_device(norm).dtype({DType::u8}).ndim(1).contiguous().writable();
  const auto address = reinterpret_cast<uintptr_t>(workspace->data) + workspace->byte_offset;
  if (workspace.size(0) < bytes || address % 256)
    workspace.reject(RK_INVALID, "has %ld bytes, expected %ld from a multiple of 256 on", workspace.size(0), bytes);
}

}  // namespace

rk_status rk_persistent_decoder_workspace_size(const rk_persistent_decoder* given, int64_t* bytes,
                                               int32_t* max_tokens) {
  return guard([&] {
    const char* op = "persistent_decoder_workspace_size";
    if (!bytes || !max_tokens) fail(RK_INVALID, "%s: bytes and max_tokens are required", op);
    backend::PersistentDecoderNeeds needs;
    *max_tokens = tokens_served(op, checked(op, given), &needs);
    *bytes = needs.workspace_bytes;
  });
}

rk_status rk_prepare_persistent_decoder(const rk_persistent_decoder* given, rk_stream stream) {
  return guard([&] {
    const char* op = "prepare_persistent_decoder";
    const auto decoder = checked(op, given);
    backend::PersistentDecoderNeeds needs;
    tokens_served(op, decoder, &needs);
    check_workspace(op, decoder, needs.workspace_bytes);
    backend::prepare_persistent_decoder(decoder, stream);
  });
}

rk_status rk_persistent_decode(const rk_persistent_decoder_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "persistent_decode";
    const auto a = read_args(op, args);
    if (!a.decoder) fail(RK_INVALID, "%s: decoder is required", op);
    const Arg hidden(op, "hidden", a.hidden), norm(op, "final_norm", a.decoder->final_norm);
    const Arg positions(op, "positions", a.positions), slots(op, "slot_mapping", a.slot_mapping);
    const Arg table(op, "page_table", a.page_table), lens(op, "kv_lens", a.kv_lens);
    hidden.same_device(norm).dtype({DType::bf16}).shape({-1, norm.size(0)}, "tokens, hidden size").contiguous();
    hidden.writable();
    require_aligned(hidden);
    const int64_t tokens = hidden.size(0);
    positions.same_device(norm).dtype({DType::i32}).shape({tokens}, "tokens").contiguous();
    slots.same_device(norm).dtype({DType::i64}).shape({tokens}, "tokens").contiguous();
    lens.same_device(norm).dtype({DType::i32}).shape({tokens}, "tokens").contiguous();
    table.same_device(norm).dtype({DType::i32}).shape({tokens, -1}, "tokens, pages").last_contiguous();
    if (table.size(1) < 1) table.reject(RK_INVALID, "has no pages");
    backend::PersistentDecoderNeeds needs;
    const int most = tokens_served(op, *a.decoder, &needs);
    if (tokens > most) hidden.reject(RK_INVALID, "has %ld tokens, this decoder serves %d", tokens, most);
    check_workspace(op, *a.decoder, needs.workspace_bytes);
    if (tokens > 0) backend::persistent_decode(a, stream);
  });
}
