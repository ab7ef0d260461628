// Linear family: checks once for every backend, then the backend's kernel.
#include "api/linear.h"

#include "common/check.h"
#include "common/gating.h"

using namespace radix;

namespace {

bool is_quantized(const rk_packed_desc& desc) {
  return desc.kind != RK_WEIGHT_DENSE;
}
bool has_small_codes(const rk_packed_desc& desc) {
  return desc.kind == RK_WEIGHT_INT4 || desc.kind == RK_WEIGHT_W4A8;
}
bool has_super_blocks(const rk_packed_desc& desc) {
  return desc.kind >= RK_WEIGHT_Q4_K && desc.kind <= RK_WEIGHT_Q6_K;
}
bool holds_pairs(const rk_packed_desc& desc) {
  return has_small_codes(desc) || desc.kind == RK_WEIGHT_Q4_K || desc.kind == RK_WEIGHT_MXFP4;
}
constexpr int64_t kSuperInputs = 256;

// An output's block of 16 is counted in float32 in linear_argmax.
constexpr int64_t kMostOutputs = 1 << 28;

// Sums of 2^17 products of bytes fit int32.
constexpr int64_t kMostInputs = 1 << 17;

void check_group(const char* op, const rk_packed_desc& desc) {
  const uint32_t group = desc.group;
  if (has_super_blocks(desc) || desc.kind == RK_WEIGHT_MXFP4) {
    const uint32_t expected = desc.kind == RK_WEIGHT_Q6_K ? 16 : 32;
    if (group != expected) fail(RK_INVALID, "%s: group is %u, expected %u, the one of this kind", op, group, expected);
    return;
  }
  const bool whole_rows = group == 0 && (!has_small_codes(desc) || backend::packs_whole_rows_of_nibbles());
  const bool is_small = group == 16 && !has_small_codes(desc);
  if (group != 32 && group != 64 && group != 128 && !is_small && !whole_rows)
    fail(RK_INVALID, "%s: group is %u, expected %s", op, group,
         has_small_codes(desc) ? "32, 64 or 128" : "16, 32, 64 or 128, or 0 for whole rows");
}

void check_inputs(const char* op, const rk_packed_desc& desc) {
  if (desc.k > kMostInputs)
    fail(RK_UNSUPPORTED, "%s: weight has %lld inputs, quantized ones have at most %lld", op, (long long)desc.k,
         (long long)kMostInputs);
}

void check_quantized(const char* op, const rk_packed_desc& desc) {
  if (desc.kind > RK_WEIGHT_FP8) fail(RK_UNSUPPORTED, "%s: kind %u of weights is unknown", op, desc.kind);
  check_group(op, desc);
  if (desc.zeros > (has_small_codes(desc) ? 1u : 0u))
    fail(RK_INVALID, "%s: zero points are for int4 and w4a8, this weight has none", op);
  if (desc.mins > 1 || (desc.mins && desc.zeros))
    fail(RK_INVALID, "%s: a weight has zero points or minima, not both", op);
  const DType type = dtype_of(desc.scale_dtype);
  if (desc.mins && (desc.kind == RK_WEIGHT_MXFP4 || desc.kind == RK_WEIGHT_FP8))
    fail(RK_INVALID, "%s: minima are for integer codes, this weight has floats", op);
  if (desc.kind == RK_WEIGHT_MXFP4) {
    if (type != DType::u8) fail(RK_DTYPE, "%s: scales have a dtype that is not uint8", op);
    return check_inputs(op, desc);
  }
  if (type != DType::bf16 && type != DType::f16 && type != DType::f32)
    fail(RK_DTYPE, "%s: scales have a dtype that is none of bfloat16, float16 and float32", op);
  check_inputs(op, desc);
}

rk_packed_desc check_desc(const char* op, const rk_packed_desc* given) {
  auto desc = read_args(op, given);
  if (desc.n < 1 || desc.k < 1)
    fail(RK_INVALID, "%s: weight has shape [%lld, %lld], expected at least [1, 1]", op, (long long)desc.n,
         (long long)desc.k);
  const DType type = dtype_of(desc.dtype);
  if (type != DType::bf16 && type != DType::f16 && type != DType::f32)
    fail(RK_DTYPE, "%s: weight has a dtype that cannot be packed, expected bfloat16, float16 or float32", op);
  if (is_quantized(desc)) check_quantized(op, desc);
  return desc;
}

// The storage must be what rk_packed_weight_info promised, in the layout that this library reads.
void check_packed(const char* op, const Arg& packed, const rk_packed_desc& desc) {
  rk_packed_desc want = desc;
  const int64_t bytes = backend::packed_weight_info(want);
  if (want.layout != desc.layout)
    fail(RK_INVALID, "%s: weight is packed in layout %u, this library reads %u", op, desc.layout, want.layout);
  packed.backend_device().dtype({DType::u8}).shape({bytes}, "size of the packed weight").contiguous();
  if ((reinterpret_cast<uintptr_t>(packed->data) + packed->byte_offset) % 64 != 0)
    packed.reject(RK_INVALID, "is not aligned to 64 bytes");
}

// x of a product [.., k] with the weight.
void check_x(const Arg& x, const Arg& packed, const rk_packed_desc& desc) {
  x.same_device(packed).dtype({dtype_of(desc.dtype)}).min_ndim(1).last_contiguous();
  if (x.size(-1) != desc.k)
    x.reject(RK_INVALID, "has shape %s, expected a last dimension of %lld (inputs of the weight)",
             shape_text(*x).c_str(), (long long)desc.k);
}

// What pack and unpack take and give.
struct Unpacked {
  const rk_tensor *weight, *scales, *zeros, *mins, *sub_scales, *sub_mins;
  bool written;
};

void check_codes(const char* op, const rk_packed_desc& desc, const Arg& packed, const Unpacked& u) {
  const auto check = [&](const char* name, const rk_tensor* tensor, DType type, int64_t columns) {
    const Arg arg(op, name, tensor);
    arg.same_device(packed).dtype({type}).shape({desc.n, columns}, "outputs of the weight, columns for its inputs");
    if (u.written) arg.writable();
  };
  const auto check_if = [&](bool wanted, const char* name, const rk_tensor* tensor, DType type, int64_t columns) {
    if ((tensor != nullptr) != wanted) fail(RK_INVALID, "%s: %s does not match the description", op, name);
    if (tensor) check(name, tensor, type, columns);
  };
  const bool supers = has_super_blocks(desc);
  const DType scale_type = dtype_of(desc.scale_dtype);
  const int64_t groups = desc.group ? (desc.k + desc.group - 1) / desc.group : 1;
  const int64_t scales = supers ? (desc.k + kSuperInputs - 1) / kSuperInputs : groups;
  if (holds_pairs(desc)) {
    check("weight", u.weight, DType::u8, (desc.k + 1) / 2);
  } else {
    check("weight", u.weight, desc.kind == RK_WEIGHT_FP8 ? DType::f8e4m3 : DType::i8, desc.k);
  }
  check("scales", u.scales, scale_type, scales);
  check_if(desc.zeros != 0, "zeros", u.zeros, DType::u8, groups);
  check_if(desc.mins != 0, "mins", u.mins, scale_type, scales);
  check_if(supers, "sub_scales", u.sub_scales, DType::i8, groups);
  check_if(supers && desc.mins != 0, "sub_mins", u.sub_mins, DType::u8, groups);
}

void check_unpacked(const char* op, const rk_packed_desc& desc, const Arg& packed, const Unpacked& u) {
  if (is_quantized(desc) && (u.scales || u.written)) return check_codes(op, desc, packed, u);
  if (has_super_blocks(desc) || desc.kind == RK_WEIGHT_MXFP4)
    fail(RK_UNSUPPORTED, "%s: scales are required, floats are not quantized to this kind", op);
  if (u.scales) fail(RK_INVALID, "%s: scales is given, but a dense weight has none", op);
  if (u.zeros || (desc.zeros && is_quantized(desc))) fail(RK_INVALID, "%s: zero points go with codes and scales", op);
  if (u.mins || (desc.mins && is_quantized(desc))) fail(RK_INVALID, "%s: minima go with codes and scales", op);
  if (u.sub_scales || u.sub_mins) fail(RK_INVALID, "%s: sub_scales and sub_mins go with codes and scales", op);
  const Arg weight(op, "weight", u.weight);
  weight.same_device(packed).dtype({dtype_of(desc.dtype)}).shape({desc.n, desc.k}, "outputs and inputs of the weight");
  if (u.written) weight.writable();
}

void check_gate(const char* op, const rk_linear_args& a, const rk_packed_desc& desc) {
  if (a.gate < RK_GATE_NONE || a.gate > RK_GATE_INTERLEAVED)
    fail(RK_INVALID, "%s: gate is %d, expected a value of RK_GATE_*", op, a.gate);
  check_gating(op, a.gating);
  if (a.gate == RK_GATE_NONE) {
    if (a.gating.activation != RK_ACTIVATION_SILU)
      fail(RK_INVALID, "%s: activation is %d, but there is no gate", op, a.gating.activation);
    return;
  }
  if (desc.n % 2 != 0)
    fail(RK_INVALID, "%s: weight has %lld outputs, expected gate and up rows of one number", op, (long long)desc.n);
  if (a.gate == RK_GATE_HALVES && desc.n % 32 != 0)
    fail(RK_UNSUPPORTED, "%s: gate halves have %lld rows, supported are multiples of 16", op, (long long)desc.n / 2);
}

void check_epilogue(const char* op, const rk_linear_args& a, const rk_packed_desc& desc, const Arg& x, const Arg& out) {
  check_gate(op, a, desc);
  const int64_t columns = desc.n / (a.gate == RK_GATE_NONE ? 1 : 2);
  bool same = out.size(-1) == columns;
  for (int i = 0; i + 1 < x->ndim; i++) same = same && out.size(i) == x.size(i);
  if (!same)
    out.reject(RK_INVALID, "has shape %s, expected x's %s with a last dimension of %lld (outputs of the weight)",
               shape_text(*out).c_str(), shape_text(*x).c_str(), (long long)columns);
  if (!a.residual) return;
  const Arg residual(op, "residual", a.residual);
  residual.same_device(out).same_dtype(x).same_shape(out).last_contiguous();
}

}  // namespace

rk_status rk_packed_weight_info(rk_packed_desc* desc, int64_t* bytes) {
  return guard([&] {
    const char* op = "packed_weight_info";
    auto checked = check_desc(op, desc);
    if (!bytes) fail(RK_INVALID, "%s: bytes is required", op);
    *bytes = backend::packed_weight_info(checked);
    desc->layout = checked.layout;
  });
}

rk_status rk_pack_weight(const rk_pack_weight_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "pack_weight";
    auto a = read_args(op, args);
    const auto desc = check_desc(op, a.desc);
    const Arg packed(op, "packed", a.packed);
    check_packed(op, packed, desc);
    check_unpacked(op, desc, packed, {a.weight, a.scales, a.zeros, a.mins, a.sub_scales, a.sub_mins, false});
    a.desc = &desc;
    backend::pack_weight(a, stream);
  });
}

rk_status rk_unpack_weight(const rk_unpack_weight_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "unpack_weight";
    auto a = read_args(op, args);
    const auto desc = check_desc(op, a.desc);
    const Arg packed(op, "packed", a.packed);
    check_packed(op, packed, desc);
    check_unpacked(op, desc, packed, {a.weight, a.scales, a.zeros, a.mins, a.sub_scales, a.sub_mins, true});
    a.desc = &desc;
    backend::unpack_weight(a, stream);
  });
}

rk_linear_args radix::checked_linear(const rk_linear_args* args, rk_packed_desc* desc) {
  const char* op = "linear";
  auto a = read_args(op, args);
  *desc = check_desc(op, a.desc);
  const Arg x(op, "x", a.x), packed(op, "weight", a.packed), out(op, "out", a.out);
  check_packed(op, packed, *desc);
  check_x(x, packed, *desc);
  out.same_device(packed).dtype({dtype_of(desc->dtype), DType::f32}).ndim(x->ndim).last_contiguous().writable();
  check_epilogue(op, a, *desc, x, out);
  if (a.bias) {
    const Arg bias(op, "bias", a.bias);
    bias.same_device(packed).dtype({dtype_of(desc->dtype), DType::f32}).shape({desc->n}, "outputs of the weight");
    bias.last_contiguous();
  }
  a.desc = desc;
  return a;
}

rk_status rk_linear(const rk_linear_args* args, rk_stream stream) {
  return guard([&] {
    rk_packed_desc desc;
    const rk_linear_args a = checked_linear(args, &desc);
    if (Arg("linear", "out", a.out).numel() > 0) backend::linear(a, stream);
  });
}

rk_status rk_linear_argmax(const rk_linear_argmax_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "linear_argmax";
    auto a = read_args(op, args);
    const auto desc = check_desc(op, a.desc);
    const Arg x(op, "x", a.x), packed(op, "weight", a.packed), ids(op, "ids", a.ids), maxima(op, "maxima", a.maxima);
    check_packed(op, packed, desc);
    check_x(x.ndim(2), packed, desc);
    ids.same_device(packed).dtype({DType::i32}).shape({x.size(0)}, "rows of x").contiguous().writable();
    maxima.same_device(packed).dtype({DType::f32}).shape({x.size(0)}, "rows of x").contiguous().writable();
    if (desc.n > kMostOutputs)
      fail(RK_UNSUPPORTED, "%s: weight has %lld outputs, at most %lld are supported", op, (long long)desc.n,
           (long long)kMostOutputs);
    a.desc = &desc;
    if (ids.numel() > 0) backend::linear_argmax(a, stream);
  });
}

rk_status rk_embedding(const rk_embedding_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "embedding";
    auto a = read_args(op, args);
    const auto desc = check_desc(op, a.desc);
    const Arg packed(op, "weight", a.packed), out(op, "out", a.out);
    check_packed(op, packed, desc);
    out.same_device(packed).dtype({dtype_of(desc.dtype)}).last_contiguous().writable();
    if (a.ids) {
      const Arg ids(op, "ids", a.ids);
      ids.same_device(packed).dtype({DType::i32, DType::i64}).ndim(1);
      out.shape({ids.size(0), desc.k}, "number of ids, inputs of the weight");
    } else {
      out.shape({desc.n, desc.k}, "outputs and inputs of the weight");
    }
    a.desc = &desc;
    if (out.numel() > 0) backend::embedding(a, stream);
  });
}
