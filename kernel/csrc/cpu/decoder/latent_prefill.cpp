// The op of latent attention un-absorbed: rk_gather_mla_kv, rk_linear, rk_concat_mla_k and rk_flash_attn_varlen of a
// few entries at a time, so that their keys and values need a bounded memory.
#include <algorithm>

#include "cpu/decoder/step.h"
#include "radix_kernels/attention.h"
#include "radix_kernels/mla_kv.h"

namespace radix::cpu::decoder {
namespace {

constexpr int64_t kExpandedBytes = 64 << 20;

// Consecutive entries and how many tokens they have in the cache.
struct Piece {
  int64_t first, entries, keys;
};

// The sizes of an op in elements, and its pieces.
class Plan {
 public:
  Plan(const rk_decoder_args& args, const rk_latent_prefill_op& op)
      : args_(args), cache("decoder", "kv_cache", op.kv_cache) {
    cache.dtype(kFloats).ndim(3);
    if (op.heads < 1 || !op.expand_desc || op.q.count % op.heads != 0 || op.out.count % op.heads != 0)
      fail(RK_INVALID, "decoder: %lld and %lld columns are not %lld heads with a weight", (long long)op.q.count,
           (long long)op.out.count, (long long)op.heads);
    heads = op.heads;
    query = op.q.count / heads;
    value = op.out.count / heads;
    latent = op.expand_desc->k;
    rotary = cache.size(2) - latent;
    nope = query - rotary;
    if (latent < 1 || rotary < 1 || nope < 1 || op.expand_desc->n != heads * (nope + value))
      fail(RK_INVALID,
           "decoder: %lld latent values become %lld of %lld heads of %lld and %lld, and a token of the cache has %lld",
           (long long)latent, (long long)op.expand_desc->n, (long long)heads, (long long)query, (long long)value,
           (long long)cache.size(2));
    check_lengths();
  }

  template <class Fn>
  void for_pieces(const Fn& fn) const {
    const int64_t end = args_.page_table->shape[0];
    const int64_t most = std::max<int64_t>(1, kExpandedBytes / expanded_bytes(1));
    for (int64_t b = end - args_.num_expanded; b < end;) {
      Piece piece{b, 0, 0};
      do {
        piece.keys += lens()[b];
        piece.entries++;
        b++;
      } while (b < end && piece.keys + lens()[b] <= most);
      fn(piece);
    }
  }

  // Where a piece's parts lie in the scratch: cu_seqlens of q and of keys, tokens of the cache, what their latent
  // values are expanded to, and the keys.
  int64_t tokens_at(const Piece& piece) const { return aligned(2 * (piece.entries + 1) * int64_t{sizeof(int32_t)}); }
  int64_t both_at(const Piece& piece) const { return tokens_at(piece) + aligned(piece.keys * cache.size(2) * item()); }
  int64_t keys_at(const Piece& piece) const { return both_at(piece) + aligned(piece.keys * both() * item()); }
  int64_t bytes(const Piece& piece) const { return keys_at(piece) + aligned(piece.keys * heads * query * item()); }

  int64_t both() const { return heads * (nope + value); }
  int64_t item() const { return element_size(*cache); }
  const int32_t* lens() const { return data_ptr<int32_t>(*args_.kv_lens); }

 private:
  int64_t expanded_bytes(int64_t keys) const { return keys * (both() + heads * query) * item(); }

  // Before memory is asked for by them.
  void check_lengths() const {
    const int64_t rows = args_.page_table->shape[0];
    const int64_t most = args_.page_table->shape[1] * cache.size(1);
    const int32_t* const begins = data_ptr<int32_t>(*args_.cu_seqlens_q);
    for (int64_t b = rows - args_.num_expanded; b < rows; b++) {
      if (lens()[b] < 0 || lens()[b] > most)
        fail(RK_INVALID, "decoder: kv_lens[%lld] is %d, expected 0 to %lld (columns of page_table x page size)",
             (long long)b, lens()[b], (long long)most);
      const int32_t queries = begins[b + 1] - begins[b];
      if (lens()[b] < queries)
        fail(RK_INVALID, "decoder: kv_lens[%lld] is %d, less than the entry's %d tokens of cu_seqlens_q", (long long)b,
             lens()[b], queries);
    }
  }

  const rk_decoder_args& args_;

 public:
  const Arg cache;
  int64_t heads, query, value, nope, latent, rotary;
};

// A piece of the op.
class Run {
 public:
  Run(const Step& step, const rk_latent_prefill_op& op, const Plan& plan, const Piece& piece)
      : step_(step), op_(op), plan_(plan), piece_(piece), type_(plan.cache->dtype) {
    const int32_t* const begins = data_ptr<int32_t>(*step.args.cu_seqlens_q) + piece.first;
    first_ = begins[0];
    queries_ = begins[piece.entries] - begins[0];
    longest_ = 0;
    for (int64_t i = 0; i <= piece.entries; i++) {
      cu_q()[i] = begins[i] - begins[0];
      cu_k()[i] = i > 0 ? cu_k()[i - 1] + plan.lens()[piece.first + i - 1] : 0;
      if (i > 0) longest_ = std::max<int64_t>(longest_, begins[i] - begins[i - 1]);
    }
  }

  void operator()() const {
    if (queries_ == 0) return;
    gather();
    expand();
    join();
    attend();
  }

 private:
  char* at(int64_t offset) const { return step_.scratch() + offset; }
  int32_t* cu_q() const { return reinterpret_cast<int32_t*>(at(0)); }
  int32_t* cu_k() const { return cu_q() + piece_.entries + 1; }
  char* tokens() const { return at(plan_.tokens_at(piece_)); }
  char* both() const { return at(plan_.both_at(piece_)); }

  // [keys, count] and [keys, heads, count].
  View matrix(char* data, int64_t row_step, int64_t count) const {
    return View(*step_.args.hidden, type_, data, piece_.keys, row_step, count);
  }
  View heads(char* data, int64_t row_step, int64_t heads, int64_t head_step, int64_t count) const {
    return View(*step_.args.hidden, type_, data, piece_.keys, row_step, heads, head_step, count);
  }
  Vector offsets(int32_t* data) const {
    return Vector(*step_.args.hidden, {RK_CODE_INT, 32, 1}, data, piece_.entries + 1);
  }
  View keys() const {
    return heads(at(plan_.keys_at(piece_)), plan_.heads * plan_.query, plan_.heads, plan_.query, plan_.query);
  }

  void gather() const {
    const Slice table(*step_.args.page_table, piece_.first, piece_.entries);
    const Vector cu = offsets(cu_k());
    const View out = matrix(tokens(), plan_.cache.size(2), plan_.cache.size(2));
    call(rk_gather_mla_kv,
         rk_gather_mla_kv_args{sizeof(rk_gather_mla_kv_args), op_.kv_cache, table, cu, /*starts=*/nullptr, out});
  }
  void expand() const {
    const View x = matrix(tokens(), plan_.cache.size(2), plan_.latent);
    const View out = matrix(both(), plan_.both(), plan_.both());
    rk_linear_args args{sizeof args, op_.expand_desc};
    args.x = x;
    args.packed = op_.expand;
    args.out = out;
    args.keep_x = 1;
    call(rk_linear, args);
  }
  void join() const {
    const View k = keys();
    const View nope = heads(both(), plan_.both(), plan_.heads, plan_.nope + plan_.value, plan_.nope);
    char* const rotary = tokens() + plan_.latent * plan_.item();
    const View rope = heads(rotary, plan_.cache.size(2), 1, plan_.rotary, plan_.rotary);
    call(rk_concat_mla_k, rk_concat_mla_k_args{sizeof(rk_concat_mla_k_args), k, nope, rope});
  }
  void attend() const {
    const Step part = step_.part(first_, queries_);
    char* const first_value = both() + plan_.nope * plan_.item();
    const View q = part.heads(op_.q, plan_.heads, 0, plan_.query);
    const View k = keys();
    const View out = part.heads(op_.out, plan_.heads, 0, plan_.value);
    const View v = heads(first_value, plan_.both(), plan_.heads, plan_.nope + plan_.value, plan_.value);
    const Vector of_q = offsets(cu_q());
    const Vector of_k = offsets(cu_k());
    rk_flash_attn_varlen_args args{sizeof args, {op_.softmax_scale, 0, /*causal=*/1, -1, -1}};
    args.q = q;
    args.k = k;
    args.v = v;
    args.cu_seqlens_q = of_q;
    args.cu_seqlens_k = of_k;
    args.out = out;
    args.max_seqlen_q = longest_;
    call(rk_flash_attn_varlen, args);
  }

  const Step& step_;
  const rk_latent_prefill_op& op_;
  const Plan& plan_;
  const Piece& piece_;
  const rk_dtype type_;
  int64_t first_, queries_, longest_;
};

}  // namespace

void run(const Step& step, const rk_latent_prefill_op& op) {
  if (step.args.num_expanded == 0) return;
  const Plan plan(step.args, op);
  plan.for_pieces([&](const Piece& piece) { Run(step, op, plan, piece)(); });
}

int64_t scratch_bytes(const rk_decoder_args& args, const rk_latent_prefill_op& op) {
  if (args.num_expanded == 0) return 0;
  const Plan plan(args, op);
  int64_t most = 0;
  plan.for_pieces([&](const Piece& piece) { most = std::max(most, plan.bytes(piece)); });
  return most;
}

}  // namespace radix::cpu::decoder
