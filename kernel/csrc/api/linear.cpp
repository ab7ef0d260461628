// Linear family: checks once for every backend, then the backend's kernel.
#include "api/linear.h"

#include "common/check.h"

using namespace radix;

namespace {

rk_packed_desc check_desc(const char* op, const rk_packed_desc* given) {
  auto desc = read_args(op, given);
  if (desc.n < 1 || desc.k < 1)
    fail(RK_INVALID, "%s: weight has shape [%lld, %lld], expected at least [1, 1]", op, (long long)desc.n,
         (long long)desc.k);
  const DType type = dtype_of(desc.dtype);
  if (type != DType::bf16 && type != DType::f16 && type != DType::f32)
    fail(RK_DTYPE, "%s: weight has a dtype that cannot be packed, expected bfloat16, float16 or float32", op);
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

void check_weight(const Arg& weight, const Arg& packed, const rk_packed_desc& desc) {
  weight.same_device(packed).dtype({dtype_of(desc.dtype)}).shape({desc.n, desc.k}, "shape of the weight");
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
    const Arg weight(op, "weight", a.weight), packed(op, "packed", a.packed);
    check_packed(op, packed, desc);
    check_weight(weight, packed, desc);
    a.desc = &desc;
    backend::pack_weight(a, stream);
  });
}

rk_status rk_unpack_weight(const rk_unpack_weight_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "unpack_weight";
    auto a = read_args(op, args);
    const auto desc = check_desc(op, a.desc);
    const Arg packed(op, "packed", a.packed), weight(op, "weight", a.weight);
    check_packed(op, packed, desc);
    check_weight(weight, packed, desc);
    weight.writable();
    a.desc = &desc;
    backend::unpack_weight(a, stream);
  });
}

rk_status rk_linear(const rk_linear_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "linear";
    auto a = read_args(op, args);
    const auto desc = check_desc(op, a.desc);
    const Arg x(op, "x", a.x), packed(op, "weight", a.packed), out(op, "out", a.out);
    check_packed(op, packed, desc);
    x.same_device(packed).dtype({dtype_of(desc.dtype)}).min_ndim(1).last_contiguous();
    if (x.size(-1) != desc.k)
      x.reject(RK_INVALID, "has shape %s, expected a last dimension of %lld (inputs of the weight)",
               shape_text(*x).c_str(), (long long)desc.k);
    out.same_device(packed).dtype({dtype_of(desc.dtype), DType::f32}).ndim(x->ndim).last_contiguous().writable();
    bool same = out.size(-1) == desc.n;
    for (int i = 0; i + 1 < x->ndim; i++) same = same && out.size(i) == x.size(i);
    if (!same)
      out.reject(RK_INVALID, "has shape %s, expected x's %s with a last dimension of %lld (outputs of the weight)",
                 shape_text(*out).c_str(), shape_text(*x).c_str(), (long long)desc.n);
    if (a.bias) {
      const Arg bias(op, "bias", a.bias);
      bias.same_device(packed).dtype({dtype_of(desc.dtype), DType::f32}).shape({desc.n}, "outputs of the weight");
      bias.last_contiguous();
    }
    a.desc = &desc;
    if (out.numel() > 0) backend::linear(a, stream);
  });
}

rk_status rk_embedding(const rk_embedding_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "embedding";
    auto a = read_args(op, args);
    const auto desc = check_desc(op, a.desc);
    const Arg ids(op, "ids", a.ids), packed(op, "weight", a.packed), out(op, "out", a.out);
    check_packed(op, packed, desc);
    ids.same_device(packed).dtype({DType::i32, DType::i64}).ndim(1);
    out.same_device(packed).dtype({dtype_of(desc.dtype)}).last_contiguous().writable();
    out.shape({ids.size(0), desc.k}, "number of ids, inputs of the weight");
    a.desc = &desc;
    if (out.numel() > 0) backend::embedding(a, stream);
  });
}
