// What the ops of a decoder share while a step runs: its tensors, and columns of its buffers as tensors.
#pragma once

#include <string>

#include "api/decoder.h"
#include "common/tensor.h"
#include "radix_kernels/library.h"

namespace radix::cpu::decoder {

// Elements of some tokens as a tensor: [tokens, count], or [tokens, heads, count] where there are heads.
class View {
 public:
  View(const rk_tensor& like, rk_dtype dtype, char* data, int64_t tokens, int64_t row_step, int64_t count)
      : View(like, dtype, data, tokens, row_step, 1, 0, count) {
    tensor_.ndim = 2;
    shape_[1] = count;
    strides_[1] = 1;
  }
  // head_step: from a head to the next one.
  View(const rk_tensor& like, rk_dtype dtype, char* data, int64_t tokens, int64_t row_step, int64_t heads,
       int64_t head_step, int64_t count)
      : tensor_(like), shape_{tokens, heads, count}, strides_{row_step, head_step, 1} {
    tensor_.dtype = dtype;
    tensor_.data = data;
    tensor_.byte_offset = 0;
    tensor_.ndim = 3;
    tensor_.shape = shape_;
    tensor_.strides = strides_;
  }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  operator const rk_tensor*() const { return &tensor_; }

 private:
  rk_tensor tensor_;
  int64_t shape_[3], strides_[3];
};

// [count], contiguous.
class Vector {
 public:
  Vector(const rk_tensor& like, rk_dtype dtype, void* data, int64_t count) : tensor_(like), count_(count) {
    tensor_.dtype = dtype;
    tensor_.data = data;
    tensor_.byte_offset = 0;
    tensor_.ndim = 1;
    tensor_.shape = &count_;
    tensor_.strides = &step_;
  }
  Vector(const Vector&) = delete;
  Vector& operator=(const Vector&) = delete;
  operator const rk_tensor*() const { return &tensor_; }

 private:
  rk_tensor tensor_;
  int64_t count_, step_ = 1;
};

// Rows [first, first + count) of a tensor of one or two dimensions.
class Slice {
 public:
  Slice(const rk_tensor& of, int64_t first, int64_t count) : tensor_(of), shape_{count, of.ndim > 1 ? of.shape[1] : 1} {
    tensor_.byte_offset += static_cast<uint64_t>(first * of.strides[0] * element_size(of));
    tensor_.shape = shape_;
  }
  Slice(const Slice&) = delete;
  Slice& operator=(const Slice&) = delete;
  operator const rk_tensor*() const { return &tensor_; }

 private:
  rk_tensor tensor_;
  int64_t shape_[2];
};

class Step {
 public:
  Step(const rk_decoder_args& args, const DecoderPlan& plan, char* memory)
      : args(args), plan_(plan), memory_(memory), tokens_(plan.tokens) {}

  const rk_decoder_args& args;

  // Some tokens of this step: its views are of these alone.
  Step part(int64_t first, int64_t count) const {
    Step step(*this);
    step.first_ += first;
    step.tokens_ = count;
    return step;
  }
  // head_dim: 0 for a matrix.
  View view(const rk_columns& c, int64_t head_dim = 0) const {
    const rk_decoder_buffer& buffer = checked(c);
    if (head_dim == 0) return View(*args.hidden, buffer.dtype, data(c), tokens_, buffer.columns, c.count);
    return View(*args.hidden, buffer.dtype, data(c), tokens_, buffer.columns, c.count / head_dim, head_dim, head_dim);
  }
  // Elements [first, first + count) of each of the heads.
  View heads(const rk_columns& c, int64_t heads, int64_t first, int64_t count) const {
    const rk_decoder_buffer& buffer = checked(c);
    if (heads < 1 || c.count % heads != 0 || first < 0 || count < 1 || first + count > c.count / heads)
      fail(RK_INVALID, "decoder: %lld columns are not %lld heads of %lld or more", (long long)c.count, (long long)heads,
           (long long)(first < 0 ? count : first + count));
    char* const from = data(c) + first * (buffer.dtype.bits / 8);
    return View(*args.hidden, buffer.dtype, from, tokens_, buffer.columns, heads, c.count / heads, count);
  }
  View whole(int32_t buffer) const {
    if (buffer < 0 || buffer >= args.num_buffers) fail(RK_INVALID, "decoder: there is no buffer %d", buffer);
    return view({buffer, 0, args.buffers[buffer].columns});
  }
  // What the next op may overwrite.
  char* scratch() const { return memory_ + plan_.scratch; }
  Vector scratch(int64_t bytes) const { return Vector(*args.hidden, {RK_CODE_UINT, 8, 1}, scratch(), bytes); }
  int64_t tokens() const { return tokens_; }

 private:
  const rk_decoder_buffer& checked(const rk_columns& c) const {
    if (c.buffer < 0 || c.buffer >= args.num_buffers) fail(RK_INVALID, "decoder: there is no buffer %d", c.buffer);
    const rk_decoder_buffer& buffer = args.buffers[c.buffer];
    if (c.first < 0 || c.count < 1 || c.first + c.count > buffer.columns)
      fail(RK_INVALID, "decoder: columns %lld to %lld of buffer %d, which has %lld", (long long)c.first,
           (long long)(c.first + c.count), c.buffer, (long long)buffer.columns);
    return buffer;
  }
  char* data(const rk_columns& c) const {
    const rk_decoder_buffer& buffer = args.buffers[c.buffer];
    char* const base = c.buffer == 0 ? data_ptr<char>(*args.hidden) : memory_ + plan_.offsets[c.buffer];
    return base + (first_ * buffer.columns + c.first) * (buffer.dtype.bits / 8);
  }

  const DecoderPlan& plan_;
  char* const memory_;
  int64_t first_ = 0, tokens_;
};

// The entries that decode, the first ones of a step, whose latent attention takes the absorbed form; and how many
// tokens they have.
struct Absorbed {
  explicit Absorbed(const rk_decoder_args& args)
      : entries(args.page_table->shape[0] - args.num_expanded),
        tokens(args.num_expanded > 0 ? data_ptr<int32_t>(*args.cu_seqlens_q)[entries] : args.hidden->shape[0]) {}
  int64_t entries, tokens;
};

// The last dimension of a cache.
inline int64_t head_dim(const rk_layer_cache& cache) {
  const Arg k("decoder", "k_cache", cache.k);
  k.ndim(4);
  return k.size(3);
}

// Parts of the scratch begin at multiples of this.
constexpr int64_t kScratchAlign = 256;
inline int64_t aligned(int64_t bytes) {
  return (bytes + kScratchAlign - 1) / kScratchAlign * kScratchAlign;
}

// Calls an entry. Its text is already a full sentence.
template <class Args>
void call(rk_status (*entry)(const Args*, rk_stream), const Args& args) {
  const rk_status status = entry(&args, 0);
  if (status != RK_OK) fail(status, "%s", std::string(rk_last_error()).c_str());
}

// One file each.
void run(const Step& step, const rk_rmsnorm_op& op);
void run(const Step& step, const rk_linear_op& op);
void run(const Step& step, const rk_rope_store_op& op);
void run(const Step& step, const rk_attention_op& op);
void run(const Step& step, const rk_gated_activation_op& op);
void run(const Step& step, const rk_add_op& op);
void run(const Step& step, const rk_scale_op& op);
void run(const Step& step, const rk_route_op& op);
void run(const Step& step, const rk_experts_op& op);
void run(const Step& step, const rk_latent_store_op& op);
void run(const Step& step, const rk_latent_attention_op& op);
void run(const Step& step, const rk_latent_prefill_op& op);

// Bytes that an op needs beside its buffers.
int64_t scratch_bytes(const rk_decoder_args& args, const rk_attention_op& op);
int64_t scratch_bytes(const rk_decoder_args& args, const rk_experts_op& op);
int64_t scratch_bytes(const rk_decoder_args& args, const rk_latent_attention_op& op);
int64_t scratch_bytes(const rk_decoder_args& args, const rk_latent_prefill_op& op);

}  // namespace radix::cpu::decoder
