// Small, odd shapes of every op of the CPU library, each tensor in an allocation of exactly its size: run under
// Valgrind this finds reads and writes past the ends, and outputs that were not written (test_memcheck.py). At one
// instruction-set level, for Valgrind knows AVX2 at most. Values are checked by the other tests. With an argument it
// makes that mistake instead, "past-the-end" or "not-written", which must be found.
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "radix_kernels/radix_kernels.h"

namespace {

constexpr rk_dtype kF32 = {RK_CODE_FLOAT, 32, 1}, kF16 = {RK_CODE_FLOAT, 16, 1}, kBf16 = {RK_CODE_BFLOAT, 16, 1};
constexpr rk_dtype kI32 = {RK_CODE_INT, 32, 1}, kI64 = {RK_CODE_INT, 64, 1};
constexpr rk_dtype kI8 = {RK_CODE_INT, 8, 1}, kU8 = {RK_CODE_UINT, 8, 1};
constexpr rk_dtype kFloats[] = {kBf16, kF16, kF32};

using Shape = std::vector<int64_t>;
std::mt19937 random_bits(7);
unsigned outputs = 0;  // of bytes that ops wrote: reading them is how Valgrind learns of one that was not

// A contiguous tensor, its memory as malloc gave it.
class Tensor {
 public:
  Tensor(rk_dtype dtype, Shape shape) : shape_(std::move(shape)), strides_(shape_.size()) {
    int64_t count = 1;
    for (size_t i = shape_.size(); i-- > 0; count *= shape_[i]) strides_[i] = count;
    bytes_ = static_cast<size_t>(count) * dtype.bits / 8;
    tensor_ = {std::malloc(bytes_),
               {RK_DEVICE_CPU, 0},
               static_cast<int32_t>(shape_.size()),
               dtype,
               shape_.data(),
               strides_.data(),
               0};
  }
  ~Tensor() { std::free(tensor_.data); }
  Tensor(Tensor&& other) noexcept
      : shape_(std::move(other.shape_)),
        strides_(std::move(other.strides_)),
        bytes_(other.bytes_),
        tensor_(other.tensor_) {
    other.tensor_.data = nullptr;
  }

  operator const rk_tensor*() const { return &tensor_; }
  template <class T>
  T* as() const {
    return static_cast<T*>(tensor_.data);
  }
  size_t bytes() const { return bytes_; }
  void read() const {
    for (size_t i = 0; i < bytes_; i++) outputs += as<unsigned char>()[i];
  }

 private:
  Shape shape_, strides_;
  size_t bytes_;
  rk_tensor tensor_;
};

// Numbers within 2 of zero.
Tensor numbers(rk_dtype dtype, Shape shape) {
  Tensor t(dtype, std::move(shape));
  if (dtype.bits == 32) {
    for (size_t i = 0; i < t.bytes() / 4; i++) t.as<float>()[i] = static_cast<int32_t>(random_bits()) * 0x1p-30f;
  } else {
    constexpr uint16_t top = 0x3fff;  // just below 2, in bf16 and in fp16
    for (size_t i = 0; i < t.bytes() / 2; i++)
      t.as<uint16_t>()[i] = static_cast<uint16_t>(random_bits() % (top + 1u) | (random_bits() & 0x8000u));
  }
  return t;
}

// Bits, of bytes below `end`.
Tensor bits(rk_dtype dtype, Shape shape, unsigned end = 256) {
  Tensor t(dtype, std::move(shape));
  for (size_t i = 0; i < t.bytes(); i++) t.as<uint8_t>()[i] = static_cast<uint8_t>(random_bits() % end);
  return t;
}

Tensor filled(Shape shape, float value) {
  Tensor t(kF32, std::move(shape));
  for (size_t i = 0; i < t.bytes() / 4; i++) t.as<float>()[i] = value;
  return t;
}

template <class T>
Tensor list(rk_dtype dtype, const std::vector<T>& values, Shape shape = {}) {
  Tensor t(dtype, shape.empty() ? Shape{static_cast<int64_t>(values.size())} : std::move(shape));
  std::memcpy(t.as<T>(), values.data(), t.bytes());
  return t;
}
Tensor ints(const std::vector<int32_t>& values, Shape shape = {}) {
  return list(kI32, values, std::move(shape));
}
Tensor longs(const std::vector<int64_t>& values) {
  return list(kI64, values);
}

void done(const char* op, rk_status status, std::initializer_list<const Tensor*> written) {
  if (status != RK_OK) {
    std::fprintf(stderr, "%s: %s\n", op, rk_last_error());
    std::exit(2);
  }
  for (const Tensor* t : written) t->read();
}

void rows(rk_dtype dtype) {
  for (int64_t n : {1, 7, 33, 100}) {
    Tensor x = numbers(dtype, {3, n}), residual = numbers(dtype, {3, n}), weight = numbers(dtype, {n}),
           out(dtype, {3, n});
    const rk_rmsnorm_args norm = {sizeof norm, 1e-6f, x, weight, out};
    done("rmsnorm", rk_rmsnorm(&norm, 0), {&out});
    const rk_fused_add_rmsnorm_args added = {sizeof added, 1e-6f, x, residual, weight};
    done("fused_add_rmsnorm", rk_fused_add_rmsnorm(&added, 0), {&x, &residual});
    const Tensor bias = numbers(kF32, {n});
    const rk_layernorm_args layer = {sizeof layer, 1e-6f, x, weight, bias, out};
    done("layernorm", rk_layernorm(&layer, 0), {&out});
    Tensor both = numbers(dtype, {3, 2 * n}), half(dtype, {3, n});
    const rk_gated_activation_args gated = {sizeof gated, both, half};
    done("silu_and_mul", rk_silu_and_mul(&gated, 0), {&half});
    done("gelu_and_mul", rk_gelu_and_mul(&gated, 0), {&half});
    done("gelu_tanh_and_mul", rk_gelu_tanh_and_mul(&gated, 0), {&half});
  }
}

void rope_and_store(rk_dtype dtype) {
  const int64_t tokens = 3, heads = 4, kv_heads = 2, dim = 48;
  const Tensor positions = longs({5, 0, 9}), table = numbers(kF32, {10, dim}), slots = longs({1, -1, 7});
  for (int neox : {0, 1}) {
    Tensor q = numbers(dtype, {tokens, heads, dim}), k = numbers(dtype, {tokens, kv_heads, dim});
    const Tensor v = numbers(dtype, {tokens, kv_heads, dim}), weight = numbers(dtype, {dim});
    Tensor k_cache = numbers(dtype, {3, 3, kv_heads, dim}), v_cache = numbers(dtype, {3, 3, kv_heads, dim});
    const rk_apply_rope_inplace_args rope = {sizeof rope, static_cast<int32_t>(dim), neox, positions, q, k, table};
    done("apply_rope_inplace", rk_apply_rope_inplace(&rope, 0), {&q, &k});
    const rk_fused_qk_norm_rope_store_args fused = {sizeof fused, 1e-6f,   neox,   q,         k,       v,
                                                    weight,       weight,  table,  positions, k_cache, v_cache,
                                                    slots,        nullptr, nullptr};
    done("fused_qk_norm_rope_store", rk_fused_qk_norm_rope_store(&fused, 0), {&q, &k_cache, &v_cache});
    const rk_store_kv_cache_args store = {sizeof store, k, v, k_cache, v_cache, slots, nullptr, nullptr};
    done("store_kv_cache", rk_store_kv_cache(&store, 0), {&k_cache, &v_cache});
    Tensor k_codes = bits(kI8, {3, 3, kv_heads, dim}), v_codes = bits(kI8, {3, 3, kv_heads, dim});
    Tensor k_scale = numbers(kF32, {3, 3, kv_heads}), v_scale = numbers(kF32, {3, 3, kv_heads});
    rk_fused_qk_norm_rope_store_args quantized = fused;
    quantized.k_cache = k_codes, quantized.v_cache = v_codes;
    quantized.k_scale = k_scale, quantized.v_scale = v_scale;
    done("fused_qk_norm_rope_store", rk_fused_qk_norm_rope_store(&quantized, 0),
         {&q, &k_codes, &v_codes, &k_scale, &v_scale});
  }
}

// INT8 where `scaled`: stored by the op itself, every slot of it.
void attention(rk_dtype dtype, bool scaled, int64_t dim, int64_t page) {
  const int64_t heads = 6, kv_heads = 2, pages = (40 + page) / page + (530 + page) / page + 1, slots = pages * page;
  std::vector<int64_t> all(static_cast<size_t>(slots));
  for (int64_t i = 0; i < slots; i++) all[static_cast<size_t>(i)] = i;
  const Tensor k = numbers(dtype, {slots, kv_heads, dim}), v = numbers(dtype, {slots, kv_heads, dim}),
               where = longs(all);
  const rk_dtype kept = scaled ? kI8 : dtype;
  Tensor k_cache(kept, {pages, page, kv_heads, dim}), v_cache(kept, {pages, page, kv_heads, dim});
  Tensor k_scale(kF32, {pages, page, kv_heads}), v_scale(kF32, {pages, page, kv_heads});
  const rk_tensor *ks = scaled ? static_cast<const rk_tensor*>(k_scale) : nullptr,
                  *vs = scaled ? static_cast<const rk_tensor*>(v_scale) : nullptr;
  const rk_store_kv_cache_args store = {sizeof store, k, v, k_cache, v_cache, where, ks, vs};
  done("store_kv_cache", rk_store_kv_cache(&store, 0), {&k_cache, &v_cache});

  const int64_t lens[] = {40, 530, 1}, width = (530 + page - 1) / page;
  std::vector<int32_t> table(static_cast<size_t>(3 * width), 1 << 30);
  int32_t next = 0;
  for (int64_t b = 0; b < 3; b++)
    for (int64_t i = 0; i * page < lens[b]; i++)
      table[static_cast<size_t>(b * width + i)] = next++ % static_cast<int32_t>(pages);
  const Tensor tables = ints(table, {3, width}), kv_lens = ints({40, 530, 1}), sinks = numbers(kF32, {heads});
  for (const std::vector<int32_t>& cu : {std::vector<int32_t>{0, 1, 2, 3}, {0, 5, 42, 43}}) {
    const int64_t tokens = cu.back();
    const Tensor q = numbers(dtype, {tokens, heads, dim}), starts = ints(cu);
    for (const rk_attention_options& o : {rk_attention_options{0.1f, 0.f, 1, -1, -1}, {0.1f, 9.f, 0, 17, -1}}) {
      Tensor out(dtype, {tokens, heads, dim}), lse(kF32, {tokens, heads});
      const rk_flash_attn_with_kvcache_args paged = {
          sizeof paged, o, q, k_cache, v_cache, tables, kv_lens, starts, sinks, out, lse, ks, vs, nullptr, 0, nullptr};
      done("flash_attn_with_kvcache", rk_flash_attn_with_kvcache(&paged, 0), {&out, &lse});
      if (scaled) continue;
      const Tensor starts_k = ints({0, 5, 60, 61}), keys = numbers(dtype, {61, kv_heads, dim});
      const rk_flash_attn_varlen_args varlen = {sizeof varlen, o,   q,       keys, keys,    starts,  starts_k, nullptr,
                                                out,           lse, nullptr, 0,    nullptr, nullptr, nullptr};
      done("flash_attn_varlen", rk_flash_attn_varlen(&varlen, 0), {&out, &lse});
      const rk_merge_state_args merge = {sizeof merge, out, lse, q, lse, out, lse};
      done("merge_state", rk_merge_state(&merge, 0), {&out, &lse});
    }
  }
}

// How a packed weight holds its elements.
struct Kind {
  uint32_t kind = RK_WEIGHT_DENSE, group = 0, zeros = 0;

  bool four_bits() const { return kind == RK_WEIGHT_INT4 || kind == RK_WEIGHT_W4A8; }
};

// A weight [n, k] in packed storage of exactly its size, which is aligned to 64 bytes: quantized from numbers, or of
// codes that are there already.
class Packed {
 public:
  Packed(rk_dtype dtype, int64_t n, int64_t k, Kind kind = {}, bool from_codes = false)
      : desc_{sizeof desc_, 0, dtype, n, k, kind.kind, kind.group, dtype, kind.zeros}, kind_(kind) {
    done("packed_weight_info", rk_packed_weight_info(&desc_, &bytes_), {});
    tensor_ = {std::aligned_alloc(64, static_cast<size_t>(bytes_)), {RK_DEVICE_CPU, 0}, 1, kU8, &bytes_, &stride_, 0};
    const Tensor w = from_codes ? bits(codes_dtype(), codes()) : numbers(dtype, {n, k});
    const Tensor scales = numbers(dtype, groups()), zeros = bits(kU8, groups(), 17);
    const rk_pack_weight_args pack = {sizeof pack,
                                      &desc_,
                                      w,
                                      &tensor_,
                                      from_codes ? static_cast<const rk_tensor*>(scales) : nullptr,
                                      kind.zeros ? static_cast<const rk_tensor*>(zeros) : nullptr};
    done("pack_weight", rk_pack_weight(&pack, 0), {});
  }
  ~Packed() { std::free(tensor_.data); }
  Packed(const Packed&) = delete;
  Packed& operator=(const Packed&) = delete;

  const rk_packed_desc* desc() const { return &desc_; }
  operator const rk_tensor*() const { return &tensor_; }

  void unpack() const {
    const bool dense = kind_.kind == RK_WEIGHT_DENSE;
    Tensor w(dense ? desc_.dtype : codes_dtype(), codes()), scales(desc_.dtype, groups()), zeros(kU8, groups());
    const rk_unpack_weight_args unpack = {sizeof unpack,
                                          &desc_,
                                          &tensor_,
                                          w,
                                          dense ? nullptr : static_cast<const rk_tensor*>(scales),
                                          kind_.zeros ? static_cast<const rk_tensor*>(zeros) : nullptr};
    done("unpack_weight", rk_unpack_weight(&unpack, 0), {&w});
    if (!dense) scales.read();
    if (kind_.zeros) zeros.read();
  }

 private:
  rk_dtype codes_dtype() const { return kind_.four_bits() ? kU8 : kI8; }
  Shape codes() const { return {desc_.n, kind_.four_bits() ? (desc_.k + 1) / 2 : desc_.k}; }
  Shape groups() const { return {desc_.n, kind_.group ? (desc_.k + kind_.group - 1) / kind_.group : 1}; }

  rk_packed_desc desc_;
  Kind kind_;
  int64_t bytes_ = 0, stride_ = 1;
  rk_tensor tensor_;
};

constexpr Kind kQuantized[] = {{RK_WEIGHT_INT8, 0},  {RK_WEIGHT_INT8, 32},    {RK_WEIGHT_W8A8, 0},
                               {RK_WEIGHT_W8A8, 64}, {RK_WEIGHT_INT4, 32},    {RK_WEIGHT_INT4, 64, 1},
                               {RK_WEIGHT_W4A8, 32}, {RK_WEIGHT_W4A8, 128, 1}};

// Plain, with a residual and, where n allows, with either gate.
void products(rk_dtype dtype, int64_t m, const Packed& packed) {
  const int64_t n = packed.desc()->n, k = packed.desc()->k;
  const Tensor x = numbers(dtype, {m, k}), bias = numbers(dtype, {n});
  for (const int32_t gate : {RK_GATE_NONE, RK_GATE_HALVES, RK_GATE_INTERLEAVED}) {
    if (gate != RK_GATE_NONE && n % 32) continue;
    const int64_t width = gate == RK_GATE_NONE ? n : n / 2;
    const Tensor residual = numbers(dtype, {m, width});
    Tensor out(dtype, {m, width});
    rk_linear_args linear = {sizeof linear, packed.desc(), x, packed, bias, out, nullptr, gate};
    done("linear", rk_linear(&linear, 0), {&out});
    linear.residual = residual;
    done("linear", rk_linear(&linear, 0), {&out});
  }
  Tensor best(kI32, {m}), maxima(kF32, {m});
  const rk_linear_argmax_args argmax = {sizeof argmax, packed.desc(), x, packed, best, maxima};
  done("linear_argmax", rk_linear_argmax(&argmax, 0), {&best, &maxima});
  packed.unpack();
  const Tensor ids = ints({0, static_cast<int32_t>(n) - 1});
  Tensor rows(dtype, {2, k});
  const rk_embedding_args embedding = {sizeof embedding, packed.desc(), ids, packed, rows};
  done("embedding", rk_embedding(&embedding, 0), {&rows});
}

void linear(rk_dtype dtype) {
  for (const auto& [m, n, k] : {std::array<int64_t, 3>{1, 33, 40}, {5, 16, 7}, {70, 48, 65}, {3, 64, 34}})
    products(dtype, m, Packed(dtype, n, k));
  for (const Kind& kind : kQuantized)
    for (const auto& [m, n, k] : {std::array<int64_t, 3>{1, 17, 34}, {9, 1, 66}, {40, 64, 130}})
      for (const bool from_codes : {false, true})
        if (from_codes || !kind.zeros) products(dtype, m, Packed(dtype, n, k, kind, from_codes));
}

void heads(rk_dtype dtype) {
  const Packed weight(dtype, 17, 23);
  const std::vector<rk_packed_head> all(3, {weight.desc(), weight});
  const Tensor x = numbers(dtype, {5, 3, 23});
  Tensor out(dtype, {5, 3, 17});
  const rk_linear_heads_args args = {sizeof args, 3, all.data(), x, out};
  done("linear_heads", rk_linear_heads(&args, 0), {&out});
}

// An inner size of whole blocks is a product with a gate.
void packed_experts(rk_dtype dtype, Kind kind) {
  const int64_t tokens = 5, topk = 2, hidden = 40;
  for (int64_t inner : {16, 24}) {
    const Packed up[] = {{dtype, 2 * inner, hidden, kind}, {dtype, 2 * inner, hidden, kind}};
    const Packed down[] = {{dtype, hidden, inner, kind}, {dtype, hidden, inner, kind}};
    const rk_packed_expert both[] = {{up[0].desc(), up[0], down[0].desc(), down[0]},
                                     {up[1].desc(), up[1], down[1].desc(), down[1]}};
    const Tensor x = numbers(dtype, {tokens, hidden}), weights = numbers(kF32, {tokens, topk});
    const Tensor ids = ints({0, 1, 1, 0, 7, 1, -1, 9, 1, 0}, {tokens, topk});
    Tensor out(dtype, {tokens, hidden});
    rk_fused_experts_packed_args args = {sizeof args, 2, both, x, weights, ids, nullptr, out, nullptr};
    int64_t bytes = 0;
    done("fused_experts_packed_workspace_size", rk_fused_experts_packed_workspace_size(&args, &bytes), {});
    const Tensor workspace(kU8, {bytes});
    args.workspace = workspace;
    done("fused_experts_packed", rk_fused_experts_packed(&args, 0), {&out});
    const Tensor bias1 = numbers(dtype, {2, 2 * inner}), bias2 = numbers(kF32, {2, hidden});
    args.bias1 = bias1;
    args.bias2 = bias2;
    args.gating = {RK_ACTIVATION_SWIGLU_CLAMPED, 1.7f, 7.f};
    done("fused_experts_packed", rk_fused_experts_packed(&args, 0), {&out});
  }
}

void experts(rk_dtype dtype) {
  const int64_t tokens = 5, count = 18, topk = 3;
  const Tensor logits = numbers(dtype, {tokens, count}), bias = numbers(kF32, {count});
  Tensor weights(kF32, {tokens, topk}), ids(kI32, {tokens, topk});
  const rk_topk_softmax_args softmax = {sizeof softmax, 1, logits, weights, ids};
  done("topk_softmax", rk_topk_softmax(&softmax, 0), {&weights, &ids});
  const rk_topk_softmax_args grouped = {sizeof grouped, 1, logits, weights, ids, 6, 3};
  done("topk_softmax", rk_topk_softmax(&grouped, 0), {&weights, &ids});
  const rk_topk_sigmoid_args sigmoid = {sizeof sigmoid, 0, logits, bias, weights, ids};
  done("topk_sigmoid", rk_topk_sigmoid(&sigmoid, 0), {&weights, &ids});
  const rk_moe_fused_gate_args gate = {sizeof gate, 6, 3, 1.f, logits, bias, weights, ids, 0};
  done("moe_fused_gate", rk_moe_fused_gate(&gate, 0), {&weights, &ids});
  const int64_t blocks = (15 + 15 * 3) / 4;
  Tensor sorted(kI32, {blocks * 4}), owners(kI32, {blocks}), total(kI32, {1});
  const rk_moe_align_block_size_args align = {sizeof align, 18, 4, ids, nullptr, sorted, owners, total};
  done("moe_align_block_size", rk_moe_align_block_size(&align, 0), {&total});
  const Tensor parts = numbers(dtype, {tokens, topk, 37});
  Tensor sum(dtype, {tokens, 37});
  const rk_moe_sum_args args = {sizeof args, parts, sum};
  done("moe_sum", rk_moe_sum(&args, 0), {&sum});
}

void sampling() {
  for (int64_t n : {5, 1003, 40000}) {
    const int64_t rows = 6, top = 4;
    Tensor logits = numbers(kF32, {rows, n}),
           counts = ints(std::vector<int32_t>(static_cast<size_t>(2 * n), 1), {2, n});
    const Tensor slots = ints({0, -1, 1, 0, 1, -1}), ids = ints({0, 1, 2, 3, -1, 4}), ones = filled({rows}, 1.1f);
    const rk_count_tokens_args count = {sizeof count, counts, slots, ids};
    done("count_tokens", rk_count_tokens(&count, 0), {&counts});
    const rk_apply_penalties_args penalties = {sizeof penalties, logits, counts, slots, ones, ones, ones};
    done("apply_penalties", rk_apply_penalties(&penalties, 0), {&logits});
    // Greedy, plain, top-k, top-p, min-p, all of them.
    const Tensor temperature = list<float>(kF32, {0, 1, 1, 1, 1, 0.7f}), top_k = ints({-1, -1, 3, -1, -1, 50});
    const Tensor top_p = list<float>(kF32, {1, 1, 1, 0.95f, 1, 0.9f}),
                 min_p = list<float>(kF32, {0, 0, 0, 0, 0.3f, 0.1f});
    const Tensor seed = longs({1, 2, 3, 4, 5, 6}), stop = ints(std::vector<int32_t>(12, 1), {rows, 2});
    const Tensor mask =
        ints(std::vector<int32_t>(static_cast<size_t>(rows * ((n + 31) / 32)), -1), {rows, (n + 31) / 32});
    const Tensor bias = filled({rows, 2}, 0.5f);
    Tensor out(kI32, {rows}), logprob(kF32, {rows}), top_logprobs(kF32, {rows, top}), top_ids(kI32, {rows, top});
    rk_top_k_top_p_sampling_args draw = {sizeof draw, 0, logits, temperature, top_k, top_p, min_p, seed, seed, out};
    done("top_k_top_p_sampling", rk_top_k_top_p_sampling(&draw, 0), {&out});
    draw.bias_ids = draw.stop_ids = stop;
    draw.bias_values = bias;
    draw.counts = counts;
    draw.slots = slots;
    draw.repetition = draw.frequency = draw.presence = ones;
    draw.min_position = seed;
    draw.bitmask = mask;
    draw.logprob = logprob;
    draw.top_logprobs = top_logprobs;
    draw.top_ids = top_ids;
    done("top_k_top_p_sampling", rk_top_k_top_p_sampling(&draw, 0), {&out, &logprob, &top_logprobs, &top_ids});
    const rk_token_logprobs_args scores = {sizeof scores, logits, ids, logprob, top_logprobs, top_ids, nullptr};
    done("token_logprobs", rk_token_logprobs(&scores, 0), {&logprob, &top_logprobs, &top_ids});
  }
}

// The latent cache's tokens, and the keys of a prefill.
void mla_kv(rk_dtype dtype) {
  const Tensor slots = longs({5, -1, 0});
  const Tensor latent = numbers(dtype, {3, 40}), rope = numbers(dtype, {3, 10});
  Tensor cache = numbers(dtype, {2, 3, 50});
  const rk_store_mla_kv_args store = {sizeof store, latent, rope, cache, slots};
  done("store_mla_kv", rk_store_mla_kv(&store, 0), {&cache});
  if (dtype.code == RK_CODE_BFLOAT) {
    const Tensor wide = numbers(dtype, {3, 512}), turned = numbers(dtype, {3, 64});
    Tensor packed = bits(kU8, {2, 3, 656});
    const rk_store_mla_kv_args quantized = {sizeof quantized, wide, turned, packed, slots};
    done("store_mla_kv", rk_store_mla_kv(&quantized, 0), {&packed});
    Tensor widened(dtype, {1, 576});
    const Tensor page = ints({1}, {1, 1}), one = ints({0, 1}), third = ints({2});
    const rk_gather_mla_kv_args widening = {sizeof widening, packed, page, one, third, widened};
    done("gather_mla_kv", rk_gather_mla_kv(&widening, 0), {&widened});
  }
  const Tensor pages = ints({1, 0, 0, 1}, {2, 2}), ends = ints({0, 5, 7}), starts = ints({1, 2});
  Tensor gathered(dtype, {7, 50});
  const rk_gather_mla_kv_args gather = {sizeof gather, cache, pages, ends, starts, gathered};
  done("gather_mla_kv", rk_gather_mla_kv(&gather, 0), {&gathered});
  const Tensor nope = numbers(dtype, {3, 5, 24}), shared = numbers(dtype, {3, 1, 10});
  Tensor k(dtype, {3, 5, 34});
  const rk_concat_mla_k_args concat = {sizeof concat, k, nope, shared};
  done("concat_mla_k", rk_concat_mla_k(&concat, 0), {&k});
}

// Three rows of two and a half pages of 4 tokens, of which one runs a chunk; rows 3 and 4 are padding's.
void step() {
  const Tensor next = ints({5, -1, 7, 0, 0}, {5, 1}), table = ints({9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 0, 0}, {4, 3});
  Tensor committed = ints({3, 10, 2, 0, 0});
  const Tensor entries = ints({0, 2, 1, 3, 0, 2, 3, 3, 1, 1, 9, 0, 4, 4, 1, 4}, {4, 4});
  const Tensor tokens = ints({0, 2, 3, 3, 3, 0, 0, 7, 8, 0, 0, 6, 3, 3, -1, ~0, ~2, 40, 41, ~3}, {4, 5});
  const Tensor samples = ints({0, 1, 3});
  Tensor lens(kI32, {4}), ids(kI32, {5}), positions(kI32, {5}), slots(kI64, {5}), pages(kI32, {4, 3}),
      behind(kI64, {3});
  const rk_fill_step_tensors_args fill = {sizeof fill, 4,    entries, tokens,    samples, next,  committed,
                                          table,       lens, ids,     positions, slots,   pages, behind};
  done("fill_step_tensors", rk_fill_step_tensors(&fill, 0),
       {&committed, &lens, &ids, &positions, &slots, &pages, &behind});
  const Tensor drawn = ints({4, 4, -1, 6}), rows = ints({0, 2, 1}), ends = ints({0, 2, 3, 4}),
               drafts = ints({0, 4, 0, 0});
  Tensor tokens_next = ints({0, 0, 0, 0, 0}, {5, 1}), counts(kI32, {3});
  const rk_accept_tokens_args accept = {sizeof accept, 0,         drawn, rows,   rows,
                                        tokens_next,   committed, ends,  drafts, counts};
  done("accept_tokens", rk_accept_tokens(&accept, 0), {&tokens_next, &committed, &counts});
}

// A row of one token over two splits and a row of a few.
void latent_attention(rk_dtype dtype) {
  const int64_t heads = 9, latent = 48, rotary = 16;
  const Tensor cache = numbers(dtype, {8, 75, latent + rotary}),
               pages = ints({0, 1, 2, 3, 4, 5, 6, 7, 7, 9, 9, 9, 9, 9, 9, 9}, {2, 8});
  const Tensor q = numbers(dtype, {4, heads, latent}), turned = numbers(dtype, {4, heads, rotary});
  const Tensor lens = ints({530, 70}), starts = ints({0, 1, 4});
  Tensor out(dtype, {4, heads, latent}), lse(kF32, {4, heads});
  const rk_mla_decode_args args = {sizeof args, 0.1f,   1,   q,   turned,  cache, pages,
                                   lens,        starts, out, lse, nullptr, 0,     1};
  done("mla_decode", rk_mla_decode(&args, 0), {&out, &lse});
  const rk_mla_decode_sizes sizes = {sizeof sizes, 4, 2, heads, 75, 8, 0, 1, 2};
  int64_t bytes = -1;
  done("mla_decode_workspace_size", rk_mla_decode_workspace_size(&sizes, &bytes), {});
}

// A layer of two sequences of three and two new tokens, then its mixture of experts in place of an MLP: every kind of
// op. `inner` in multiples of 16 is a product with a gate.
void decoder(rk_dtype dtype, Kind kind, int64_t inner, int32_t activation) {
  const int64_t heads = 4, kv_heads = 2, dim = 16, width = 40, tokens = 5, experts = 3, topk = 2;
  const int64_t rows = (heads + 2 * kv_heads) * dim;
  const Packed qkv(dtype, rows, width, kind), o(dtype, width, heads * dim, kind),
      gate_up(dtype, 2 * inner, width, kind), down(dtype, width, inner, kind), router(dtype, experts, width, Kind{});
  const Tensor norm = numbers(dtype, {width}), head_norm = numbers(dtype, {dim}), table = numbers(kF32, {8, dim});
  const Tensor k = numbers(dtype, {4, 4, kv_heads, dim}), v = numbers(dtype, {4, 4, kv_heads, dim});
  const Tensor sinks = numbers(kF32, {heads});
  const rk_layer_cache cache = {k, v, nullptr, nullptr};
  const std::vector<rk_packed_expert> all(experts, {gate_up.desc(), gate_up, down.desc(), down});

  enum { kResidual, kNormed, kQkv, kAttended, kBoth, kGated, kOut, kLogits, kWeights, kIds };
  const std::vector<rk_decoder_buffer> buffers = {
      {width, dtype}, {width, dtype}, {rows, dtype},   {heads * dim, dtype}, {2 * inner, dtype},
      {inner, dtype}, {width, dtype}, {experts, kF32}, {topk, kF32},         {topk, kI32}};
  const auto whole = [&](int32_t buffer) { return rk_columns{buffer, 0, buffers[buffer].columns}; };
  const rk_columns none = {}, q = {kQkv, 0, heads * dim}, keys = {kQkv, heads * dim, kv_heads * dim},
                   values = {kQkv, (heads + kv_heads) * dim, kv_heads * dim};
  const rk_rmsnorm_op normed = {whole(kResidual), whole(kNormed), norm, 1e-6f};
  const rk_linear_op to_heads = {whole(kNormed), whole(kQkv), none, qkv.desc(), qkv, nullptr, RK_GATE_NONE};
  const rk_rope_store_op store = {q, keys, values, cache, head_norm, head_norm, table, 1e-6f, 1};
  const rk_attention_op attend = {q, whole(kAttended), cache, sinks, 0.25f, 9.f, 3};
  const rk_linear_op from_heads = {whole(kAttended), whole(kResidual), whole(kResidual), o.desc(), o,
                                   nullptr,          RK_GATE_NONE};
  const bool fused = inner % 16 == 0;
  const rk_linear_op first = {whole(kNormed), whole(fused ? kGated : kBoth),        none, gate_up.desc(), gate_up,
                              nullptr,        fused ? RK_GATE_HALVES : RK_GATE_NONE};
  const rk_gated_activation_op between = {whole(kBoth), whole(kGated), activation};
  const rk_linear_op second = {whole(kGated), whole(kOut), none, down.desc(), down, nullptr, RK_GATE_NONE};
  const rk_add_op add = {kResidual, kOut};
  const rk_linear_op scores = {whole(kNormed), whole(kLogits), none, router.desc(), router, nullptr, RK_GATE_NONE};
  const rk_route_op route = {whole(kLogits), whole(kWeights), whole(kIds), nullptr, RK_ROUTE_SOFTMAX, 1, 1, 1, 1.f};
  const rk_experts_op mix = {whole(kNormed), whole(kWeights), whole(kIds),
                             whole(kOut),    all.data(),      static_cast<int32_t>(experts)};
  std::vector<rk_decoder_op> ops = {{RK_OP_RMSNORM, &normed},   {RK_OP_LINEAR, &to_heads},   {RK_OP_ROPE_STORE, &store},
                                    {RK_OP_ATTENTION, &attend}, {RK_OP_LINEAR, &from_heads}, {RK_OP_RMSNORM, &normed},
                                    {RK_OP_LINEAR, &first}};
  if (!fused) ops.push_back({RK_OP_GATED_ACTIVATION, &between});
  for (const rk_decoder_op& op : {rk_decoder_op{RK_OP_LINEAR, &second},
                                  {RK_OP_ADD, &add},
                                  {RK_OP_RMSNORM, &normed},
                                  {RK_OP_LINEAR, &scores},
                                  {RK_OP_ROUTE, &route},
                                  {RK_OP_EXPERTS, &mix},
                                  {RK_OP_ADD, &add}})
    ops.push_back(op);

  const Tensor positions = longs({4, 5, 6, 0, 1}), slots = longs({4, 5, 6, 8, 9});
  const Tensor pages = ints({0, 1, 2, 3}, {2, 2}), kv_lens = ints({7, 2}), starts = ints({0, 3, 5});
  Tensor hidden = numbers(dtype, {tokens, width});
  rk_decoder_args args = {sizeof args,
                          static_cast<int32_t>(buffers.size()),
                          buffers.data(),
                          ops.data(),
                          static_cast<int64_t>(ops.size()),
                          hidden,
                          positions,
                          slots,
                          pages,
                          kv_lens,
                          starts,
                          3,
                          nullptr};
  int64_t bytes = 0;
  done("decoder_workspace_size", rk_decoder_workspace_size(&args, &bytes), {});
  const Tensor workspace(kU8, {bytes});
  args.workspace = workspace;
  done("decoder", rk_decoder(&args, 0), {&hidden});
}

// Latent attention of a decode row and of two chunks, the first over cached tokens: 32 of the elements of a token of
// the cache are latent values, 16 of each query rotary ones.
void latent_decoder(rk_dtype dtype) {
  const int64_t heads = 3, query = 48, value = 16, latent = 32, rotary = 16, tokens = 6;
  const Packed up(dtype, latent, query - rotary), down(dtype, value, latent);
  const std::vector<rk_packed_head> absorb(heads, {up.desc(), up}), values(heads, {down.desc(), down});
  const Packed expand(dtype, heads * (query - rotary + value), latent);
  const Tensor cache = numbers(dtype, {6, 4, latent + rotary}), table = numbers(kF32, {16, rotary});
  const int64_t widths[] = {heads * query, latent, rotary, heads * value};
  const std::vector<rk_decoder_buffer> buffers = {{widths[0] + widths[1] + widths[2] + widths[3], dtype}};
  const rk_columns q = {0, 0, widths[0]}, kv = {0, widths[0], latent}, rope = {0, widths[0] + latent, rotary},
                   out = {0, widths[0] + latent + rotary, widths[3]};
  const rk_latent_store_op store = {q, kv, rope, heads, cache, table, 0};
  const rk_latent_attention_op decode = {q, out, heads, absorb.data(), values.data(), cache, 0.2f};
  const rk_latent_prefill_op prefill = {q, out, heads, expand.desc(), expand, cache, 0.2f};
  const rk_decoder_op ops[] = {
      {RK_OP_LATENT_STORE, &store}, {RK_OP_LATENT_ATTENTION, &decode}, {RK_OP_LATENT_PREFILL, &prefill}};
  const Tensor positions = ints({4, 5, 6, 0, 1, 2}, {tokens}), slots = longs({4, 13, 14, 16, 17, 18});
  const Tensor pages = ints({0, 1, 2, 3, 4, 5}, {3, 2}), kv_lens = ints({5, 7, 3}), starts = ints({0, 1, 3, 6});
  Tensor hidden = numbers(dtype, {tokens, buffers[0].columns});
  rk_decoder_args args{sizeof args, 1, buffers.data(), ops, 3, hidden, positions, slots, pages, kv_lens, starts, 3};
  args.num_expanded = 2;
  int64_t bytes = 0;
  done("decoder_workspace_size", rk_decoder_workspace_size(&args, &bytes), {});
  const Tensor workspace(kU8, {bytes});
  args.workspace = workspace;
  done("decoder", rk_decoder(&args, 0), {&hidden});
}

// Two ranks, each a thread: the waits are real.
void collectives() {
  char path[] = "/tmp/radix_memcheck_XXXXXX";
  close(mkstemp(path));
  const auto rank = [&](int32_t self, Tensor& sum, Tensor& gathered, Tensor& sent) {
    rk_comm* comm = nullptr;
    done("comm_create", rk_comm_create(path, self, 2, 4096, 60, &comm), {});
    done("comm_all_reduce", rk_comm_all_reduce(comm, sum), {});
    done("comm_all_gather", rk_comm_all_gather(comm, sum, gathered), {});
    done("comm_broadcast", rk_comm_broadcast(comm, sent, 1), {});
    done("comm_barrier", rk_comm_barrier(comm, 0), {});
    rk_comm_destroy(comm);
  };
  for (const rk_dtype dtype : kFloats) {
    std::vector<Tensor> sums, gathered, sent;
    for (int i = 0; i < 2; i++) {
      sums.push_back(numbers(dtype, {3, 37}));
      gathered.emplace_back(dtype, Shape{2, 3, 37});
      sent.push_back(numbers(dtype, {11}));
    }
    if (truncate(path, 0)) std::exit(2);
    std::thread other(rank, 1, std::ref(sums[1]), std::ref(gathered[1]), std::ref(sent[1]));
    rank(0, sums[0], gathered[0], sent[0]);
    other.join();
    for (int i = 0; i < 2; i++) done("collectives", RK_OK, {&sums[i], &gathered[i], &sent[i]});
  }
  unlink(path);
}

// What Valgrind must not let pass.
void plant(const std::string& mistake) {
  const Tensor x = numbers(kF32, {3, 7}), weight = numbers(kF32, {6}), out(kF32, {3, 7});
  int64_t seven = 7;
  rk_tensor longer = *static_cast<const rk_tensor*>(weight);
  longer.shape = &seven;
  const rk_rmsnorm_args norm = {sizeof norm, 1e-6f, x, &longer, out};
  if (mistake == "past-the-end") done("rmsnorm", rk_rmsnorm(&norm, 0), {});
  if (mistake == "not-written") done("rmsnorm", RK_OK, {&out});
}

void every_op() {
  for (const rk_dtype dtype : kFloats) {
    rows(dtype);
    rope_and_store(dtype);
    attention(dtype, false, 80, 7);
    attention(dtype, true, 48, 16);
    linear(dtype);
    heads(dtype);
    experts(dtype);
    mla_kv(dtype);
    latent_attention(dtype);
    latent_decoder(dtype);
    for (const Kind kind : {Kind{}, Kind{RK_WEIGHT_W8A8, 0}, Kind{RK_WEIGHT_INT4, 32}}) {
      packed_experts(dtype, kind);
      decoder(dtype, kind, 48, RK_ACTIVATION_SILU);
      decoder(dtype, kind, 24, RK_ACTIVATION_GELU);
    }
  }
  sampling();
  step();
  collectives();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc > 1) {
    plant(argv[1]);
  } else {
    every_op();
  }
  const char* level = nullptr;
  done("isa", rk_isa(&level), {});
  std::printf("memcheck: ran at level %s (%u)\n", level, outputs);
}
