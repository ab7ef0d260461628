// MLA family: checks once for every backend, then the backend's kernel.
#include "api/mla.h"

#include "common/tensor.h"

using namespace radix;

namespace {

constexpr int64_t kMaxLatent = 512, kMaxRope = 64, kFp8Bytes = 656;

void check_size(const Arg& x, int64_t most) {
  if (x.size(2) < 16 || x.size(2) % 16 != 0 || x.size(2) > most)
    x.reject(RK_UNSUPPORTED, "has last dimension %lld, supported are multiples of 16 up to %lld", (long long)x.size(2),
             (long long)most);
}

// On a GPU rows are moved in pieces of 16 bytes.
void need_alignment(const Arg& x) {
  if (x->device.type == RK_DEVICE_CPU) return;
  bool even = reinterpret_cast<uintptr_t>(data_ptr<char>(*x)) % 16 == 0;
  for (int i = 0; i + 1 < x->ndim; i++) even &= x.size(i) == 1 || x.stride(i) * element_size(*x) % 16 == 0;
  if (!even) x.reject(RK_UNSUPPORTED, "has rows that are not aligned to 16 bytes");
}

void check_workspace(const char* op, const Arg& q, const rk_tensor* workspace, int64_t need) {
  if (!workspace) {
    if (need > 0) fail(RK_INVALID, "%s: workspace is NULL, %lld bytes are needed", op, (long long)need);
    return;
  }
  const Arg a(op, "workspace", workspace);
  a.same_device(q).dtype({DType::u8}).ndim(1).contiguous().writable();
  if (a.size(0) < need)
    a.reject(RK_INVALID, "has %lld bytes, expected at least %lld", (long long)a.size(0), (long long)need);
  if (reinterpret_cast<uintptr_t>(data_ptr<char>(*a)) % 256 != 0 && need > 0)
    a.reject(RK_INVALID, "is not aligned to 256 bytes");
}

}  // namespace

rk_status rk_mla_decode(const rk_mla_decode_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "mla_decode";
    const auto a = read_args(op, args);
    const Arg q(op, "q_nope", a.q_nope), rope(op, "q_rope", a.q_rope), cache(op, "kv_cache", a.kv_cache);
    const Arg table(op, "page_table", a.page_table), lens(op, "kv_lens", a.kv_lens);
    const Arg cu(op, "cu_seqlens_q", a.cu_seqlens_q), out(op, "out", a.out);
    q.backend_device().dtype(kFloats).ndim(3).last_contiguous();
    rope.same_device(q).same_dtype(q).shape({q.size(0), q.size(1), -1}, "tokens and heads of q_nope").last_contiguous();
    check_size(q, kMaxLatent);
    check_size(rope, kMaxRope);
    cache.same_device(q).ndim(3).last_contiguous();
    if (cache.type() == DType::u8) {
      cache.shape({-1, -1, kFp8Bytes}, "bytes of an FP8 token");
      q.dtype({DType::bf16, DType::f16}).shape({-1, -1, kMaxLatent}, "latent size of an FP8 token");
      rope.shape({-1, -1, kMaxRope}, "rotary size of an FP8 token");
    } else {
      cache.same_dtype(q).shape({-1, -1, q.size(2) + rope.size(2)}, "latent and rotary values");
    }
    if (cache.size(1) < 1) cache.reject(RK_INVALID, "has page size 0");
    table.same_device(q).dtype({DType::i32}).ndim(2).last_contiguous();
    lens.same_device(q).dtype({DType::i32}).shape({table.size(0)}, "rows of page_table").contiguous();
    cu.same_device(q).dtype({DType::i32}).shape({table.size(0) + 1}, "rows of page_table, plus 1").contiguous();
    out.same_device(q).same_dtype(q).same_shape(q).last_contiguous().writable();
    if (a.lse) {
      const Arg lse(op, "lse", a.lse);
      lse.same_device(q).dtype({DType::f32}).shape({q.size(0), q.size(1)}, "tokens and heads of q_nope").writable();
    }
    for (const Arg* x : {&q, &rope, &cache, &out}) need_alignment(*x);
    if (a.max_seqlen_q < 0)
      fail(RK_INVALID, "%s: max_seqlen_q is %lld, expected 0 or more", op, (long long)a.max_seqlen_q);
    if (q.numel() == 0) return;
    if (table.size(0) == 0) table.reject(RK_INVALID, "has no rows, but q_nope has tokens");
    const rk_mla_decode_sizes sizes = {sizeof sizes,  q.size(0),      table.size(0), q.size(1),           cache.size(1),
                                       table.size(1), a.max_seqlen_q, a.any_split,   element_size(*cache)};
    check_workspace(op, q, a.workspace, backend::mla_decode_workspace_size(sizes));
    backend::mla_decode(a, stream);
  });
}

rk_status rk_mla_decode_workspace_size(const rk_mla_decode_sizes* sizes, int64_t* bytes) {
  return guard([&] { *bytes = backend::mla_decode_workspace_size(read_args("mla_decode_workspace_size", sizes)); });
}
