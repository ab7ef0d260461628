// Sampling from shards of the vocabulary: the scan of sampling.cu and a block a row that lists the shard's first ids;
// later a block a row that draws from the lists of all shards.
#include "api/sampling_shards.h"
#include "gpu/sampling/row_finish.h"
#include "gpu/sampling/sampling_run.h"

namespace radix {
namespace {

using namespace gpu;

constexpr int kHeader = RK_CANDIDATES_HEADER;

struct Listing {
  Matrix logits;
  Draw draw;
  Edits edits;
  Scratch scratch;
  int64_t* records;  // [rows, kHeader + candidates]
  int candidates;
};

__device__ inline void write_header(int64_t* record, uint64_t best, float largest, int listed, double mass) {
  if (threadIdx.x != 0) return;
  record[0] = static_cast<int64_t>(best);
  record[1] = static_cast<int64_t>(static_cast<uint64_t>(listed) << 32 | __float_as_uint(largest));
  record[2] = __double_as_longlong(mass);
}

// The row's first `number` words, sorted; perhaps more. Returns how many, fewer where the row has no more.
template <bool kEdits>
__device__ int list_first(Selection& s, const Row<kEdits>& row, const Tops& tops, float largest, uint32_t first_id,
                          int number) {
  const Ruler ruler = ruler_of(tops, largest);
  int count = gather(s, row, tops, ruler, first_id, number, kBins - 1);
  if (count >= 0) return count;
  Sweep task{Sweep::Action::list, Ruler::of(largest, 2 * kBins / ruler.scale)};
  task.low = find_border(s, row, first_id, task, number);
  sweep(s, row, first_id, task);
  count = s.count;
  sort_words(s, count);
  return count;
}

template <bool kEdits>
__global__ void __launch_bounds__(kSelectThreads, 2) candidates_kernel(const RK_PARAMETER Listing k) {
  __shared__ Selection s;
  wait_for_previous();
  const int64_t b = blockIdx.x;
  int64_t* record = k.records + b * (kHeader + k.candidates);
  const Draw& draw = k.draw;
  const Kind kind = draw.kind(b);
  const float temperature = draw.divisor(b);
  Row<kEdits> row(k.logits, b, temperature, k.edits);
  const Standing standing = standing_of(s, row, k.scratch, draw, kind);
  const bool finite = isfinite(standing.largest);
  // Greedy after all, if this is the largest of all shards.
  if (finite && kind != Kind::greedy && !isfinite(standing.largest / temperature)) {
    row.temperature = 1;  // as given
    return write_header(record, first_largest(s, row, standing.largest, draw.first_id), standing.largest, 0, 0);
  }
  if (!finite || kind != Kind::filtered) return write_header(record, standing.best, standing.largest, 0, 0);
  const Filters f = filters_of(draw, k.scratch, b, standing.largest);
  const int wanted = f.by_number && f.top_k < k.candidates ? static_cast<int>(f.top_k) : k.candidates;
  const Tops tops{k.scratch.of_row(k.scratch.edited, b).largest, k.scratch.groups, temperature};
  int listed = list_first(s, row, tops, f.largest, draw.first_id, wanted);
  if (listed > wanted) listed = wanted;
  for (int i = threadIdx.x; i < listed; i += kSelectThreads) record[kHeader + i] = static_cast<int64_t>(s.words[i]);
  write_header(record, 0, standing.largest, listed, f.mass);
}

struct Merge {
  Draw draw;
  const int64_t* records;  // [shards, rows, kHeader + candidates]
  int64_t rows;
  int shards, candidates;
  int32_t* out;

  __device__ const int64_t* record(int shard, int64_t b) const {
    return records + (shard * rows + b) * (kHeader + candidates);
  }
  __device__ float largest(int shard, int64_t b) const {
    return __uint_as_float(static_cast<uint32_t>(record(shard, b)[1]));
  }
  __device__ int listed(int shard, int64_t b) const { return static_cast<int>(record(shard, b)[1] >> 32); }
};

// The lists of all shards as one, sorted, up to where no shard can have an id that is not listed. Returns its length.
__device__ inline int join_lists(Selection& s, const Merge& k, int64_t b, const Filters& f, bool* complete) {
  uint64_t end = 0;  // the last word up to which the lists are whole
  clear_list(s);
  for (int shard = 0; shard < k.shards; shard++) {
    const int64_t* words = k.record(shard, b) + kHeader;
    const int listed = k.listed(shard, b);
    for (int i = threadIdx.x; i < listed; i += kSelectThreads) append(s, static_cast<uint64_t>(words[i]));
    // A list that holds top_k ids ends where no later one can be kept.
    const bool cut = listed == k.candidates && !(f.by_number && listed >= f.top_k);
    const uint64_t last = cut ? static_cast<uint64_t>(words[listed - 1]) : 0;
    end = last > end ? last : end;
  }
  __syncthreads();
  const int all = s.count;
  sort_words(s, all);
  int whole = 0;
  for (int i = threadIdx.x; i < all; i += kSelectThreads) whole += s.words[i] >= end;
  *complete = end == 0;
  return reduce_block(whole, Sum());
}

__device__ inline int32_t merge_row(Selection& s, const Merge& k, int64_t b) {
  float largest = -INFINITY;
  for (int shard = 0; shard < k.shards; shard++) largest = MaxOrNan()(largest, k.largest(shard, b));
  if (!isfinite(largest)) return -1;
  const Draw& draw = k.draw;
  const Kind kind = draw.kind(b);
  const float temperature = draw.divisor(b);
  const bool greedy_after_all = kind != Kind::greedy && !isfinite(largest / temperature);
  if (kind != Kind::filtered || greedy_after_all) {
    uint64_t best = 0;
    for (int shard = 0; shard < k.shards; shard++) {
      const auto word = static_cast<uint64_t>(k.record(shard, b)[0]);
      const float top = k.largest(shard, b);
      // A shard whose quotients overflow has left a logit: of the row's largest it is the answer, of less it is none.
      const bool counts = kind == Kind::greedy || (greedy_after_all ? top == largest : isfinite(top / temperature));
      if (counts && word > best) best = word;
    }
    return static_cast<int32_t>(id_of(best));
  }
  Filters f = Filters::of(draw.of_row(b), draw.vocabulary, largest);
  for (int shard = 0; shard < k.shards; shard++) {
    const float top = k.largest(shard, b);
    if (top > -INFINITY)
      f.mass += __longlong_as_double(k.record(shard, b)[2]) *
                exp((static_cast<double>(top) - static_cast<double>(largest)) / static_cast<double>(temperature));
  }
  bool complete;
  const int count = join_lists(s, k, b, f, &complete);
  if (f.by_number && !complete && count < f.top_k) return -2;
  const int kept = count_kept(s, count, f, complete);
  return kept > 0 ? draw_listed(s, kept, draw, b) : -2;
}

__global__ void __launch_bounds__(kSelectThreads, 2) merge_kernel(const RK_PARAMETER Merge k) {
  __shared__ Selection s;
  wait_for_previous();
  const int32_t id = merge_row(s, k, blockIdx.x);
  if (threadIdx.x == 0) k.out[blockIdx.x] = id;
}

}  // namespace

namespace backend {

static_assert(kMostCandidates <= gpu::kCapacity);

void sampling_candidates(const rk_sampling_candidates_args& a, rk_stream stream) {
  const char* op = "sampling_candidates";
  const rk_device device = a.logits->device;
  const Matrix logits(*a.logits);
  Scan scan{logits, draw_of(a, a.vocab_size, a.first_id), edits_of(a, a.first_id), {}, true, false};
  run_scan(op, device, stream, scan, *a.workspace, false);
  const Listing listing{logits,
                        scan.draw,
                        scan.edits,
                        scan.scratch,
                        data_ptr<int64_t>(*a.records),
                        static_cast<int>(a.records->shape[1] - kHeader)};
  launch_dependent(op, device, stream, any(scan.edits) ? candidates_kernel<true> : candidates_kernel<false>,
                   dim3(static_cast<unsigned>(logits.rows)), dim3(kSelectThreads), listing);
}

void sample_candidates(const rk_sample_candidates_args& a, rk_stream stream) {
  const rk_tensor& records = *a.records;
  const Merge merge{draw_of(a, a.vocab_size, 0),
                    data_ptr<int64_t>(records),
                    records.shape[1],
                    static_cast<int>(records.shape[0]),
                    static_cast<int>(records.shape[2] - kHeader),
                    data_ptr<int32_t>(*a.out)};
  launch_dependent("sample_candidates", a.out->device, stream, merge_kernel, dim3(static_cast<unsigned>(merge.rows)),
                   dim3(kSelectThreads), merge);
}

}  // namespace backend
}  // namespace radix
