// y = x W^T + b with x as it is, of kinds that quantize it otherwise, for one ISA level.
#include "cpu/linear/widened.h"

#include "cpu/linear/kernel_widened.h"
#include "cpu/linear/tiles_job.h"

namespace radix::cpu::RK_ISA {

using linear_layout::Quantized;
using linear_layout::SuperBlocks;

#if RK_HAS_PRODUCT_TILES
namespace {

// Groups of so many inputs fill tiles of int8: with one size of weight or another that is faster than to widen them.
constexpr int64_t kFillingBytes = 64, kFillingNibbles = 128;

template <class Values, class Layout>
std::unique_ptr<Job> job(const rk_linear_args& args, const Layout& layout, RowMaxima* maxima) {
  return std::make_unique<TilesJob<WidenedAmx<Values, Layout>, Layout>>(args, layout, maxima);
}

std::unique_ptr<Job> groups_job(const rk_linear_args& args, RowMaxima* maxima) {
  const Quantized q(*args.desc);
  if (q.bits == 8) return job<GroupValues<8, false>>(args, q, maxima);
  return q.floats ? job<GroupValues<4, true>>(args, q, maxima) : job<GroupValues<4, false>>(args, q, maxima);
}

std::unique_ptr<Job> supers_job(const rk_linear_args& args, RowMaxima* maxima) {
  const SuperBlocks q(*args.desc);
  switch (q.bits) {
    case 4: return job<SuperValues<4>>(args, q, maxima);
    case 5: return job<SuperValues<5>>(args, q, maxima);
    default: return job<SuperValues<6>>(args, q, maxima);
  }
}

}  // namespace

bool keeps_x(const rk_packed_desc& desc, DType x) {
  if (x != DType::bf16 || desc.kind == RK_WEIGHT_DENSE || desc.k < 1) return false;
  if (SuperBlocks::holds(desc)) return true;
  const Quantized q(desc);
  return q.int8_x && q.group < (q.bits == 8 ? kFillingBytes : kFillingNibbles);
}

std::unique_ptr<Job> widened_job(const rk_linear_args& args, RowMaxima* maxima) {
  return SuperBlocks::holds(*args.desc) ? supers_job(args, maxima) : groups_job(args, maxima);
}

#else

bool keeps_x(const rk_packed_desc&, DType) {
  return false;
}

std::unique_ptr<Job> widened_job(const rk_linear_args&, RowMaxima*) {
  return nullptr;
}

#endif

}  // namespace radix::cpu::RK_ISA
