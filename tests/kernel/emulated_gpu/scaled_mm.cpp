// The epilogue of the products on mma.sync, a lane after the other: sums as a warp's instructions leave them, tiles
// that reach beyond the result, every kind of scale, zero point and bias. Prints how many results were compared.
#include <cstdio>
#include <random>
#include <vector>

#include "sm80/scaled_mm/epilogue.cuh"

void block_barrier() {}

namespace {

using namespace radix;
using namespace radix::scaled_mm;

constexpr int kRows = 2, kColumns = 4;      // instructions of a warp: 32 tokens x 32 columns
constexpr int kTokens = 45, kOutputs = 48;  // neither is a multiple of a warp's share
constexpr int kStep = kOutputs + 8;         // of the result's rows
constexpr uint16_t kPoison = 0x7fc1;

std::minstd_rand generator(11);

int random_int(int low, int high) {
  return low + static_cast<int>(generator() % (high - low + 1));
}

// A product's facts: values of tokens or columns are `step` apart, or one for all.
struct Product {
  std::vector<int32_t> sums = std::vector<int32_t>(kTokens * kOutputs);
  std::vector<float> scale_x, scale_w, bias;
  std::vector<uint16_t> bias16;
  std::vector<int32_t> zeros, weight_sums;
  std::vector<uint16_t> out = std::vector<uint16_t>(kTokens * kStep, kPoison);
  Epilogue e{};

  Product(int step, bool shifted, int bias_kind, bool is_f16) {
    for (int32_t& sum : sums) sum = random_int(-2000000, 2000000);
    e.out = reinterpret_cast<char*>(out.data());
    e.out_step = kStep;
    e.out_is_f16 = is_f16;
    for (int i = 0; i < kTokens * 2; i++) scale_x.push_back(random_int(1, 64) / 65536.f);
    for (int i = 0; i < kOutputs * 2; i++) scale_w.push_back(random_int(1, 64) / 64.f);
    for (int i = 0; i < kTokens * 2; i++) zeros.push_back(random_int(-128, 127));
    for (int i = 0; i < kOutputs; i++) {
      weight_sums.push_back(random_int(-9000, 9000));
      bias.push_back(static_cast<float>(random_int(-64, 64)));
      bias16.push_back(bits(bias.back()));
    }
    e.scale_x = scale_x.data();
    e.scale_w = scale_w.data();
    e.scale_x_step = e.scale_w_step = e.zeros_step = step;
    if (shifted) {
      e.zeros = zeros.data();
      e.weight_sums = weight_sums.data();
    }
    e.bias_is_float = bias_kind == 2;
    if (bias_kind == 1) e.bias = reinterpret_cast<const char*>(bias16.data());
    if (bias_kind == 2) e.bias = reinterpret_cast<const char*>(bias.data());
  }

  // Rounded as the result is.
  uint16_t bits(float x) const {
    uint16_t word;
    if (e.out_is_f16) {
      f16 half;
      gpu::from_float(x, half);
      word = half.bits;
    } else {
      bf16 half;
      gpu::from_float(x, half);
      word = half.bits;
    }
    return word;
  }

  // In float64, rounded twice: to float32 and to the result's type.
  uint16_t expected(int token, int column) const {
    const int64_t step = e.scale_x_step;
    int64_t sum = sums[token * kOutputs + column];
    if (e.zeros) sum -= int64_t{zeros[token * step]} * weight_sums[column];
    const double scale = static_cast<double>(scale_x[token * step]) * scale_w[column * step];
    return bits(static_cast<float>(sum * scale + (e.bias ? bias[column] : 0)));
  }
};

// What a lane of an m16n8 instruction holds (PTX ISA, mma.m16n8k32): c0 and c1 of one row, c2 and c3 of the row 8
// below.
int row_of(int lane, int i) {
  return lane / 4 + (i < 2 ? 0 : 8);
}
int column_of(int lane, int i) {
  return lane % 4 * 2 + i % 2;
}

template <class Sum>
void run_warp(const Product& p, int row, int column) {
  for (int lane = 0; lane < 32; lane++) {
    std::vector<Sum> sums;
    for (int j = 0; j < kColumns; j++)
      for (int i = 0; i < kRows; i++)
        for (int c = 0; c < 4; c++) {
          const int token = row + i * 16 + row_of(lane, c), at = column + j * 8 + column_of(lane, c);
          const bool there = token < kTokens && at < kOutputs;
          sums.push_back(static_cast<Sum>(there ? p.sums[token * kOutputs + at] : 123456789));
        }
    finish_warp<kRows, kColumns>(p.e, sums.data(), row, column, kTokens, kOutputs, lane);
  }
}

template <class Sum>
int compare(Product p) {
  for (int row = 0; row < kTokens; row += 32)
    for (int column = 0; column < kOutputs; column += 32) run_warp<Sum>(p, row, column);
  for (int token = 0; token < kTokens; token++)
    for (int column = 0; column < kStep; column++) {
      const uint16_t found = p.out[token * kStep + column];
      const uint16_t expected = column < kOutputs ? p.expected(token, column) : kPoison;
      if (found == expected) continue;
      std::fprintf(stderr, "token %d, column %d: %04x, expected %04x\n", token, column, found, expected);
      std::exit(1);
    }
  return kTokens * kOutputs;
}

}  // namespace

int main() {
  int compared = 0;
  for (int step = 0; step < 3; step++)
    for (int bias = 0; bias < 3; bias++)
      for (bool is_f16 : {false, true}) {
        for (bool shifted : {false, true}) compared += compare<int32_t>(Product(step, shifted, bias, is_f16));
        compared += compare<float>(Product(step, false, bias, is_f16));
      }
  std::printf("%d\n", compared);
}
