// What the ops of a decoder share while a step runs: its tensors, and columns of its buffers as tensors.
#pragma once

#include <string>

#include "api/decoder.h"
#include "common/tensor.h"
#include "radix_kernels/library.h"

namespace radix::cpu::decoder {

// Columns of a buffer as a tensor: [tokens, count], or [tokens, heads, count / heads], or [tokens, heads, tail], the
// last elements of each head.
class View {
 public:
  View(const rk_tensor& like, rk_dtype dtype, char* data, int64_t tokens, int64_t count, int64_t row_step,
       int64_t head_dim = 0, int64_t tail = 0)
      : tensor_(like) {
    const int64_t skipped = tail > 0 ? head_dim - tail : 0;
    tensor_.dtype = dtype;
    tensor_.data = data + skipped * (dtype.bits / 8);
    tensor_.byte_offset = 0;
    tensor_.ndim = head_dim > 0 ? 3 : 2;
    const int64_t width = head_dim > 0 ? head_dim : 1;
    shape_[0] = tokens, shape_[1] = count / width, shape_[2] = width - skipped;
    strides_[0] = row_step, strides_[1] = width, strides_[2] = 1;
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

// uint8 [count].
class Bytes {
 public:
  Bytes(const rk_tensor& like, char* data, int64_t count) : tensor_(like), count_(count) {
    tensor_.dtype = {RK_CODE_UINT, 8, 1};
    tensor_.data = data;
    tensor_.byte_offset = 0;
    tensor_.ndim = 1;
    tensor_.shape = &count_;
    tensor_.strides = &step_;
  }
  Bytes(const Bytes&) = delete;
  Bytes& operator=(const Bytes&) = delete;
  operator const rk_tensor*() const { return &tensor_; }

 private:
  rk_tensor tensor_;
  int64_t count_, step_ = 1;
};

class Step {
 public:
  Step(const rk_decoder_args& args, const DecoderPlan& plan, char* memory) : args(args), plan_(plan), memory_(memory) {}

  const rk_decoder_args& args;

  // head_dim: 0 for a matrix.
  View view(const rk_columns& c, int64_t head_dim = 0) const {
    const rk_decoder_buffer& buffer = checked(c);
    char* const data = base(c.buffer) + c.first * (buffer.dtype.bits / 8);
    return View(*args.hidden, buffer.dtype, data, plan_.tokens, c.count, buffer.columns, head_dim);
  }
  // The last `tail` elements of each of the heads; 0: all of them.
  View heads(const rk_columns& c, int64_t heads, int64_t tail = 0) const {
    const rk_decoder_buffer& buffer = checked(c);
    if (heads < 1 || c.count % heads != 0 || tail < 0 || tail > c.count / heads)
      fail(RK_INVALID, "decoder: %lld columns are not %lld heads of %lld or more", (long long)c.count, (long long)heads,
           (long long)tail);
    char* const data = base(c.buffer) + c.first * (buffer.dtype.bits / 8);
    return View(*args.hidden, buffer.dtype, data, plan_.tokens, c.count, buffer.columns, c.count / heads, tail);
  }
  View whole(int32_t buffer) const {
    if (buffer < 0 || buffer >= args.num_buffers) fail(RK_INVALID, "decoder: there is no buffer %d", buffer);
    return view({buffer, 0, args.buffers[buffer].columns});
  }
  // What the next op may overwrite.
  Bytes scratch(int64_t bytes) const { return Bytes(*args.hidden, memory_ + plan_.scratch, bytes); }
  int64_t tokens() const { return plan_.tokens; }

 private:
  const rk_decoder_buffer& checked(const rk_columns& c) const {
    if (c.buffer < 0 || c.buffer >= args.num_buffers) fail(RK_INVALID, "decoder: there is no buffer %d", c.buffer);
    const rk_decoder_buffer& buffer = args.buffers[c.buffer];
    if (c.first < 0 || c.count < 1 || c.first + c.count > buffer.columns)
      fail(RK_INVALID, "decoder: columns %lld to %lld of buffer %d, which has %lld", (long long)c.first,
           (long long)(c.first + c.count), c.buffer, (long long)buffer.columns);
    return buffer;
  }
  char* base(int32_t buffer) const {
    return buffer == 0 ? data_ptr<char>(*args.hidden) : memory_ + plan_.offsets[buffer];
  }

  const DecoderPlan& plan_;
  char* const memory_;
};

// The last dimension of a cache.
inline int64_t head_dim(const rk_layer_cache& cache) {
  const Arg k("decoder", "k_cache", cache.k);
  k.ndim(4);
  return k.size(3);
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

// Bytes that an op needs beside its buffers.
int64_t scratch_bytes(const rk_decoder_args& args, const rk_attention_op& op);
int64_t scratch_bytes(const rk_decoder_args& args, const rk_experts_op& op);
int64_t scratch_bytes(const rk_decoder_args& args, const rk_latent_attention_op& op);

}  // namespace radix::cpu::decoder
