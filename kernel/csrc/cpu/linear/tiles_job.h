// A product on AMX tiles that takes bf16 x as it is.
#pragma once

#include "cpu/tiles.h"

#if RK_HAS_PRODUCT_TILES

#include "cpu/linear/jobs.h"
#include "cpu/linear/kernel_amx.h"

namespace radix::cpu::RK_ISA {

// 16 rows of x, number `group`, as `tiles` tiles, zero from k on. Four at a time, so that what is written is
// contiguous.
inline void stage_tiles(const Problem& p, const StagedX& x, int64_t tiles, int64_t group) {
  constexpr int64_t kRun = 4;
  const int64_t whole = p.k * 2 / kLine, tail = p.k * 2 % kLine;
  const int64_t m0 = group * kTileRows, m1 = lesser(p.m, m0 + kTileRows);
  for (int64_t c0 = 0; c0 < whole; c0 += kRun)
    for (int64_t m = m0; m < m1; m++)
      for (int64_t c = c0; c < lesser(c0 + kRun, whole); c++)
        std::memcpy(x.at(m, c), p.x.at<char>(m) + c * kLine, kLine);
  for (int64_t m = m0; m < m1; m++) {
    for (int64_t c = whole; c < tiles; c++) std::memset(x.at(m, c), 0, kLine);
    if (tail) std::memcpy(x.at(m, whole), p.x.at<char>(m) + whole * kLine, tail);
  }
}

// Layout: `kp` inputs and `block` bytes of a packed block.
template <class Product, class Layout>
class TilesJob final : public Job {
 public:
  TilesJob(const rk_linear_args& args, const Layout& layout, RowMaxima* maxima)
      : Job(args, maxima, layout.block, round_up(Rows(*args.x).count, kTileRows) * layout.kp * 2),
        layout_(layout),
        x_(tiled_x(nullptr, layout_.kp * 2)) {
    stage_by(kTileRows, 16 * layout_.kp);
    cut_for(product());
  }

  void stage(int64_t begin, int64_t end) const noexcept override {
    for (int64_t group = begin; group < end; group++) stage_tiles(p_, x_, layout_.kp * 2 / kLine, group);
  }
  void run(int64_t task, const Ahead& ahead, LaneMaxima* largest) const noexcept override {
    run_product(product(), task, ahead, largest);
  }

 private:
  void place_x(char* scratch) override { x_ = tiled_x(scratch, layout_.kp * 2); }
  Product product() const { return Product(layout_, x_); }

  const Layout layout_;
  StagedX x_;
};

}  // namespace radix::cpu::RK_ISA

#endif
