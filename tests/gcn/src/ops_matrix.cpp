// Matrix products: D = A B + C of one wave, 32x32 or 16x16.
//
// With N columns the lanes are 64 / N groups. Lane l holds row (of A) or column (of B) l % N, and of K the part of its
// group. Of D it holds column l % N; register r is row 4 g + r % 4 + 4 (64 / N) (r / 4), g its group.
#include "fp8.h"
#include "lanes.h"

namespace gcn {
namespace {

enum class Element { kBf16, kF16, kF32, kI8, kFp8, kBf8 };

double element(const Wave& w, Element type, const uint8_t* at) {
  u32 bits = 0;
  switch (type) {
    case Element::kBf16: std::memcpy(&bits, at, 2); return std::bit_cast<float>(bits << 16);
    case Element::kF16: std::memcpy(&bits, at, 2); return std::bit_cast<half>(static_cast<uint16_t>(bits));
    case Element::kF32: std::memcpy(&bits, at, 4); return std::bit_cast<float>(bits);
    case Element::kI8: return static_cast<int8_t>(*at);
    case Element::kFp8: return Fp8(3, w.program.object.target != "gfx950").decode(*at);
    case Element::kBf8: return Fp8(2, w.program.object.target != "gfx950").decode(*at);
  }
  return 0;
}

constexpr unsigned bytes_of(Element type) {
  return type == Element::kF32 ? 4 : type == Element::kBf16 || type == Element::kF16 ? 2 : 1;
}

template <unsigned N, unsigned K, Element A, Element B>
void multiply(Wave& w, const Instruction& in) {
  constexpr unsigned groups = 64 / N, part = K / groups, results = N * N / 64;
  if (w.exec() != ~u64{0}) fault("a matrix product with lanes off");
  if (in.broadcast) fault("a matrix product with cbsz, abid or blgp");
  double a[N][K], b[N][K];
  const auto read = [&](const Operand& op, Element type, double(*out)[K]) {
    for (unsigned l = 0; l < 64; l++) {
      for (unsigned k = 0; k < part; k++) {
        const unsigned at = k * bytes_of(type);
        const u32 word = w.vector(op.index + at / 4)[l];
        out[l % N][l / N * part + k] = element(w, type, reinterpret_cast<const uint8_t*>(&word) + at % 4);
      }
    }
  };
  read(in.op[1], A, a);
  read(in.op[2], B, b);
  u32 out[results][64];
  for (unsigned r = 0; r < results; r++) {
    Lanes hold;
    const u32* c = w.source(in.op[3], in.op[3].kind == Operand::Kind::kVector ? r : 0, hold);
    for (unsigned l = 0; l < 64; l++) {
      const unsigned row = 4 * (l / N) + r % 4 + 4 * groups * (r / 4), column = l % N;
      double sum = 0;
      for (unsigned k = 0; k < K; k++) sum += a[row][k] * b[column][k];
      if (A == Element::kI8)
        out[r][l] = static_cast<u32>(static_cast<i32>(sum)) + c[l];
      else
        out[r][l] = std::bit_cast<u32>(static_cast<float>(sum + std::bit_cast<float>(c[l])));
    }
  }
  for (unsigned r = 0; r < results; r++) std::copy_n(out[r], 64, w.vector(in.op[0].index + r));
}

using E = Element;

}  // namespace

void add_matrix(Table& t) {
  const Entry entries[] = {
      {"v_mfma_f32_32x32x8_f16", multiply<32, 8, E::kF16, E::kF16>},
      {"v_mfma_f32_16x16x16_f16", multiply<16, 16, E::kF16, E::kF16>},
      {"v_mfma_f32_32x32x8_bf16", multiply<32, 8, E::kBf16, E::kBf16>},
      {"v_mfma_f32_32x32x8bf16_1k", multiply<32, 8, E::kBf16, E::kBf16>},
      {"v_mfma_f32_16x16x16_bf16", multiply<16, 16, E::kBf16, E::kBf16>},
      {"v_mfma_f32_16x16x16bf16_1k", multiply<16, 16, E::kBf16, E::kBf16>},
      {"v_mfma_f32_32x32x16_f16", multiply<32, 16, E::kF16, E::kF16>},
      {"v_mfma_f32_16x16x32_f16", multiply<16, 32, E::kF16, E::kF16>},
      {"v_mfma_f32_32x32x16_bf16", multiply<32, 16, E::kBf16, E::kBf16>},
      {"v_mfma_f32_16x16x32_bf16", multiply<16, 32, E::kBf16, E::kBf16>},
      {"v_mfma_i32_32x32x32_i8", multiply<32, 32, E::kI8, E::kI8>},
      {"v_mfma_i32_16x16x64_i8", multiply<16, 64, E::kI8, E::kI8>},
      // Without cbsz and blgp, which are refused: e4m3. Which K a register holds is the same for A and B.
      {"v_mfma_f32_32x32x64_f8f6f4", multiply<32, 64, E::kFp8, E::kFp8>},
      {"v_mfma_f32_16x16x128_f8f6f4", multiply<16, 128, E::kFp8, E::kFp8>},
      {"v_mfma_f32_32x32x2_f32", multiply<32, 2, E::kF32, E::kF32>},
      {"v_mfma_f32_16x16x4_f32", multiply<16, 4, E::kF32, E::kF32>},
      {"v_mfma_i32_32x32x16_i8", multiply<32, 16, E::kI8, E::kI8>},
      {"v_mfma_i32_16x16x32_i8", multiply<16, 32, E::kI8, E::kI8>},
      {"v_mfma_f32_32x32x16_fp8_fp8", multiply<32, 16, E::kFp8, E::kFp8>},
      {"v_mfma_f32_32x32x16_fp8_bf8", multiply<32, 16, E::kFp8, E::kBf8>},
      {"v_mfma_f32_32x32x16_bf8_fp8", multiply<32, 16, E::kBf8, E::kFp8>},
      {"v_mfma_f32_32x32x16_bf8_bf8", multiply<32, 16, E::kBf8, E::kBf8>},
      {"v_mfma_f32_16x16x32_fp8_fp8", multiply<16, 32, E::kFp8, E::kFp8>},
      {"v_mfma_f32_16x16x32_fp8_bf8", multiply<16, 32, E::kFp8, E::kBf8>},
      {"v_mfma_f32_16x16x32_bf8_fp8", multiply<16, 32, E::kBf8, E::kFp8>},
      {"v_mfma_f32_16x16x32_bf8_bf8", multiply<16, 32, E::kBf8, E::kBf8>},
  };
  t.insert(t.end(), std::begin(entries), std::end(entries));
}

}  // namespace gcn
