// mla_kv family: checks once for every backend, then the backend's kernel.
#include "api/mla_kv.h"

#include "common/tensor.h"

using namespace radix;

namespace {

constexpr int64_t kLatent = 512, kRope = 64, kFp8Bytes = 656;

// Rows are moved in pieces of 16 bytes.
void need_alignment(const Arg& x) {
  bool even = reinterpret_cast<uintptr_t>(data_ptr<char>(*x)) % 16 == 0;
  for (int i = 0; i + 1 < x->ndim; i++) even &= x.size(i) == 1 || x.stride(i) * element_size(*x) % 16 == 0;
  if (!even) x.reject(RK_UNSUPPORTED, "has rows that are not aligned to 16 bytes");
}

}  // namespace

rk_status rk_store_mla_kv(const rk_store_mla_kv_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "store_mla_kv";
    const auto a = read_args(op, args);
    const Arg latent(op, "latent", a.latent), rope(op, "rope", a.rope), cache(op, "kv_cache", a.kv_cache);
    const Arg slots(op, "slot_mapping", a.slot_mapping);
    latent.backend_device().dtype(kFloats).ndim(2).last_contiguous();
    rope.same_device(latent).same_dtype(latent).shape({latent.size(0), -1}, "tokens of latent").last_contiguous();
    cache.same_device(latent).ndim(3).last_contiguous().writable();
    if (cache.type() == DType::u8) {
      cache.shape({-1, -1, kFp8Bytes}, "bytes of an FP8 token");
      latent.dtype({DType::bf16}).shape({-1, kLatent}, "latent size of an FP8 token");
      rope.shape({-1, kRope}, "rotary size of an FP8 token");
      for (const Arg* x : {&latent, &rope, &cache}) need_alignment(*x);
    } else {
      cache.same_dtype(latent).shape({-1, -1, latent.size(1) + rope.size(1)}, "latent and rotary values");
    }
    slots.same_device(latent).dtype({DType::i64}).shape({latent.size(0)}, "tokens of latent");
    backend::store_mla_kv(a, stream);
  });
}

rk_status rk_gather_mla_kv(const rk_gather_mla_kv_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "gather_mla_kv";
    const auto a = read_args(op, args);
    const Arg cache(op, "kv_cache", a.kv_cache), table(op, "page_table", a.page_table);
    const Arg cu(op, "cu_seqlens", a.cu_seqlens), out(op, "out", a.out);
    cache.backend_device().ndim(3).last_contiguous();
    out.same_device(cache).dtype(kFloats).ndim(2).last_contiguous().writable();
    if (cache.type() == DType::u8) {
      cache.shape({-1, -1, kFp8Bytes}, "bytes of an FP8 token");
      out.dtype({DType::bf16}).shape({-1, kLatent + kRope}, "values of an FP8 token");
      for (const Arg* x : {&cache, &out}) need_alignment(*x);
    } else {
      cache.same_dtype(out);
      out.shape({-1, cache.size(2)}, "values of a token");
    }
    if (cache.size(1) < 1) cache.reject(RK_INVALID, "has page size 0");
    table.same_device(cache).dtype({DType::i32}).ndim(2).last_contiguous();
    cu.same_device(cache).dtype({DType::i32}).shape({table.size(0) + 1}, "rows of page_table, plus 1").contiguous();
    if (a.starts) {
      const Arg starts(op, "starts", a.starts);
      starts.same_device(cache).dtype({DType::i32}).shape({table.size(0)}, "rows of page_table").contiguous();
    }
    if (table.size(0) == 0 && out.size(0) > 0) table.reject(RK_INVALID, "has no rows, but out has tokens");
    backend::gather_mla_kv(a, stream);
  });
}

rk_status rk_concat_mla_k(const rk_concat_mla_k_args* args, rk_stream stream) {
  return guard([&] {
    const char* op = "concat_mla_k";
    const auto a = read_args(op, args);
    const Arg k(op, "k", a.k), nope(op, "k_nope", a.k_nope), rope(op, "k_rope", a.k_rope);
    nope.backend_device().dtype(kFloats).ndim(3).last_contiguous();
    rope.same_device(nope)
        .same_dtype(nope)
        .shape({nope.size(0), 1, -1}, "tokens of k_nope, one head")
        .last_contiguous();
    k.same_device(nope).same_dtype(nope);
    k.shape({nope.size(0), nope.size(1), nope.size(2) + rope.size(2)}, "as k_nope, with k_rope behind");
    k.last_contiguous().writable();
    backend::concat_mla_k(a, stream);
  });
}
