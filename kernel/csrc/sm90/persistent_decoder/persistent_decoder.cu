// The front of the persistent decoder: checked tensors become Params, which the workspace has room for.
//
// Workspace: the layers' table, then what blocks hand each other (exchange.cuh), all in one piece, so that few entries
// of the address translation serve it.
#include "api/persistent_decoder.h"

#include <vector>

#include "common/tensor.h"
#include "sm90/persistent_decoder/kernel.cuh"

namespace radix {
namespace {

using namespace persistent_decoder;

constexpr const char* kOp = "persistent_decoder";

const bf16* vector_of(const rk_tensor* t) {
  return t ? data_ptr<bf16>(*t) : nullptr;
}
const float* floats_of(const rk_tensor* t) {
  return t ? data_ptr<float>(*t) : nullptr;
}
Weight weight_of(const rk_tensor* t, const rk_tensor* scales) {
  return {t ? data_ptr<char>(*t) : nullptr, floats_of(scales)};
}

// What follows from the decoder alone.
Params shared_params(const rk_persistent_decoder& d) {
  const rk_persistent_layer& first = d.layers[0];
  const rk_tensor& cache = *first.k_cache;
  Params p = {};
  p.num_layers = d.num_layers;
  p.hidden_size = static_cast<int>(d.final_norm->shape[0]);
  p.heads = d.heads;
  p.kv_heads = d.kv_heads;
  p.width = static_cast<int>(first.down->shape[first.down->ndim - 1]);
  if (first.router) {
    p.experts = static_cast<int>(first.router->shape[0]);
    p.top_k = d.top_k;
    p.renormalize = d.renormalize != 0;
  }
  p.gated_size = p.experts > 0 ? p.top_k * p.width : p.width;
  p.eps = d.eps;
  p.qk_eps = d.qk_eps;
  p.score_scale = d.softmax_scale * sm90::kLog2e;
  p.final_norm = vector_of(d.final_norm);
  p.cos_sin = floats_of(d.cos_sin_cache);
  p.max_position = d.cos_sin_cache->shape[0];
  while ((int64_t{1} << p.page_shift) < cache.shape[1]) p.page_shift++;
  p.num_slots = static_cast<int>(cache.shape[0] * cache.shape[1]);
  p.cache = {cache.strides[0], cache.strides[1], cache.strides[2]};
  return p;
}

bool is_scaled(const rk_persistent_decoder& d) {
  return d.layers[0].qkv_scale != nullptr;
}

bool is_served(const Params& p, bool scaled, const rk_tensor& cache) {
  const int chunk = scaled ? kRowData : kRowData / 2, unit = scaled ? kBlock : kUnit;
  const auto is_k = [&](int k) { return k >= chunk && k % unit == 0; };
  const bool has_experts = p.experts == 0 || (p.experts % kStageRows == 0 && p.experts <= kMaxExperts &&
                                              p.top_k <= kMaxTopK && p.width % unit == 0);
  const int64_t gated_rows = 2 * p.gated_size, rows = qkv_rows(p) > gated_rows ? qkv_rows(p) : gated_rows;
  return p.hidden_size % 256 == 0 && p.hidden_size <= kMaxNormed && is_k(p.hidden_size) && is_k(p.heads * kHeadDim) &&
         is_k(p.gated_size) && has_experts && p.heads / p.kv_heads <= kMaxGroup &&
         (int64_t{1} << p.page_shift) == cache.shape[1] && cache.shape[0] * cache.shape[1] < int64_t{1} << 31 &&
         rows / kStageRows * 1024 < int64_t{1} << 31;
}

// The workspace's parts, in words of 64 bits.
struct WorkspaceMap {
  int64_t layers, hidden, qkv, attended, logits, gated, parts, control, words;

  explicit WorkspaceMap(const Params& p) {
    constexpr int64_t kAlignWords = 32;
    int64_t at = 0;
    const auto take = [&](int64_t count) {
      const int64_t begin = at;
      at += (count + kAlignWords - 1) / kAlignWords * kAlignWords;
      return begin;
    };
    layers = take(int64_t{p.num_layers} * sizeof(Layer) / 8);
    control = take(1);
    hidden = take(kMaxTokens * p.hidden_size / 2);
    qkv = take(kMaxTokens * qkv_rows(p) / 2);
    attended = take(kMaxTokens * p.heads * kHeadDim / 2);
    logits = take(kMaxTokens * p.experts);
    gated = take(kMaxTokens * p.gated_size / 2);
    parts = take(int64_t{kMaxTokens} * p.heads * kMaxSplits * kPartWords);
    words = at;
  }
};
static_assert(sizeof(Layer) % 8 == 0);

// The most tokens of a call on a device with so many multiprocessors.
int most_tokens(Params p, int blocks) {
  int most = 0;
  for (p.tokens = 1; p.tokens <= kMaxTokens; p.tokens++)
    if (p.tokens * p.kv_heads <= blocks && shared_plan(p, p.experts > 0).stages >= kMinStages) most = p.tokens;
  return most;
}

using Launch = void (*)(const Params&, rk_device, rk_stream);
Launch launch_of(bool mixture, bool scaled) {
  if (mixture) return scaled ? launch<Form<true, true>> : launch<Form<true, false>>;
  return scaled ? launch<Form<false, true>> : launch<Form<false, false>>;
}

}  // namespace

namespace backend {

PersistentDecoderNeeds persistent_decoder_needs(const rk_persistent_decoder& decoder) {
  const rk_device device = decoder.final_norm->device;
  const Params p = shared_params(decoder);
  const bool is_hopper = gpu::device_attribute<cudaDevAttrComputeCapabilityMajor>(device, kOp) == 9;
  if (!is_hopper || !is_served(p, is_scaled(decoder), *decoder.layers[0].k_cache)) return {0, 0};
  return {WorkspaceMap(p).words * 8, most_tokens(p, gpu::multiprocessors(device))};
}

void prepare_persistent_decoder(const rk_persistent_decoder& decoder, rk_stream stream) {
  std::vector<Layer> layers;
  for (int i = 0; i < decoder.num_layers; i++) {
    const rk_persistent_layer& l = decoder.layers[i];
    Layer layer;
    layer.qkv = weight_of(l.qkv, l.qkv_scale);
    layer.o = weight_of(l.o, l.o_scale);
    layer.router = weight_of(l.router, nullptr);
    layer.gate_up = weight_of(l.gate_up, l.gate_up_scale);
    layer.down = weight_of(l.down, l.down_scale);
    layer.qkv_bias = vector_of(l.qkv_bias);
    layer.input_norm = vector_of(l.input_norm);
    layer.post_norm = vector_of(l.post_norm);
    layer.q_norm = floats_of(l.q_norm);
    layer.k_norm = floats_of(l.k_norm);
    layer.k_cache = data_ptr<bf16>(*l.k_cache);
    layer.v_cache = data_ptr<bf16>(*l.v_cache);
    layers.push_back(layer);
  }
  const gpu::DeviceScope scope(decoder.final_norm->device);
  const auto queue = reinterpret_cast<cudaStream_t>(stream);
  char* workspace = data_ptr<char>(*decoder.workspace);
  gpu::check_gpu(
      cudaMemcpyAsync(workspace, layers.data(), layers.size() * sizeof(Layer), cudaMemcpyHostToDevice, queue), kOp);
  gpu::check_gpu(cudaStreamSynchronize(queue), kOp);
}

void persistent_decode(const rk_persistent_decoder_args& args, rk_stream stream) {
  const rk_persistent_decoder& decoder = *args.decoder;
  Params p = shared_params(decoder);
  const WorkspaceMap map(p);
  auto* words = data_ptr<uint64_t>(*decoder.workspace);
  p.layers = reinterpret_cast<const Layer*>(words + map.layers);
  p.tokens = static_cast<int>(args.hidden->shape[0]);
  p.hidden = data_ptr<bf16>(*args.hidden);
  p.positions = data_ptr<int32_t>(*args.positions);
  p.slots = data_ptr<int64_t>(*args.slot_mapping);
  p.page_table = data_ptr<int32_t>(*args.page_table);
  p.page_table_step = args.page_table->strides[0];
  p.kv_lens = data_ptr<int32_t>(*args.kv_lens);
  p.workspace.hidden = words + map.hidden;
  p.workspace.qkv = words + map.qkv;
  p.workspace.attended = words + map.attended;
  p.workspace.logits = words + map.logits;
  p.workspace.gated = words + map.gated;
  p.workspace.parts = words + map.parts;
  p.workspace.control = reinterpret_cast<uint32_t*>(words + map.control);
  launch_of(p.experts > 0, is_scaled(decoder))(p, args.hidden->device, stream);
}

}  // namespace backend
}  // namespace radix
