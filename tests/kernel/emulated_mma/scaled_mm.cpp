// The products on mma.sync, kernel by kernel: every tile of both types, with rows, columns and a slice of k that are
// not all there, against float64 of the codes; padding of the operands and shared memory hold poison. Takes a seed,
// prints how many results were compared.
#include <random>

#include "sm80/scaled_mm/kernel.cuh"

namespace radix::scaled_mm {
alignas(1024) char shared[kMaxSharedBytes];  // of the block that runs
}

namespace {

using namespace radix;
using namespace radix::scaled_mm;

constexpr int kXGap = 16, kWeightGap = 32, kOutGap = 8;
constexpr uint8_t kPoison = 0x7f;  // NaN, or the largest code
constexpr uint16_t kUnwritten = 0x7fc1;
constexpr double kAllowed = 4.5e-3;  // of bfloat16 and the terms' magnitudes

std::mt19937 generator;
int compared = 0;

// Rows of codes that begin at multiples of 16 bytes, with poison behind each.
class Codes {
 public:
  Codes(int rows, int columns, int gap, bool is_int8) : step(columns + gap), bytes_(rows * step + 16, kPoison) {
    for (int i = 0; i < rows; i++)
      for (int j = 0; j < columns; j++) data()[i * step + j] = is_int8 ? generator() : random_e4m3();
  }
  uint8_t* data() { return reinterpret_cast<uint8_t*>((reinterpret_cast<uintptr_t>(bytes_.data()) + 15) / 16 * 16); }

  const int step;

 private:
  // Any number: sums of hundreds round in float32, so that their order shows.
  static uint8_t random_e4m3() {
    for (;;) {
      const uint8_t code = generator();
      if ((code & 0x7f) != 0x7f) return code;
    }
  }

  std::vector<uint8_t> bytes_;
};

template <class In>
struct Product {
  static constexpr bool kIsInt8 = std::is_same_v<In, int8_t>;
  Codes x, weight;
  std::vector<float> scale_x, scale_w, bias;
  std::vector<int32_t> zeros, weight_sums;
  Problem q{};

  Product(int m, int n, int k, bool shifted)
      : x(m, k, kXGap, kIsInt8), weight(n, k, kWeightGap, kIsInt8), weight_sums(n) {
    for (int i = 0; i < m; i++) scale_x.push_back(1 + generator() % 8);
    for (int i = 0; i < m; i++) zeros.push_back(static_cast<int>(generator() % 256) - 128);
    for (int j = 0; j < n; j++) scale_w.push_back((1 + generator() % 8) / 4096.f);
    for (int j = 0; j < n; j++) bias.push_back(generator() % 16);
    for (int j = 0; j < n; j++)
      for (int l = 0; l < k; l++) weight_sums[j] += static_cast<int8_t>(weight.data()[j * weight.step + l]);
    q.x = reinterpret_cast<const char*>(x.data());
    q.weight = reinterpret_cast<const char*>(weight.data());
    q.x_step = x.step;
    q.weight_step = weight.step;
    q.m = m;
    q.n = n;
    q.k = k;
    Epilogue& e = q.epilogue;
    e.out_step = n + kOutGap;
    e.scale_x = scale_x.data();
    e.scale_w = scale_w.data();
    e.scale_x_step = e.scale_w_step = e.zeros_step = 1;
    e.bias = reinterpret_cast<const char*>(bias.data());
    e.bias_is_float = true;
    if (shifted) {
      e.zeros = zeros.data();
      e.weight_sums = weight_sums.data();
    }
  }

  template <class Tile>
  std::vector<uint16_t> run() {
    std::vector<uint16_t> out(q.m * q.epilogue.out_step, kUnwritten);
    q.epilogue.out = reinterpret_cast<char*>(out.data());
    const int tiles = (q.m + Tile::kTokens - 1) / Tile::kTokens * ((q.n + Tile::kRows - 1) / Tile::kRows);
    for (int i = 0; i < tiles; i++) {
      std::memset(shared, kPoison, sizeof shared);
      emulated::run_block(i, Tile::kThreads, [this] { scaled_mm_kernel<In, Tile>(q); });
    }
    return out;
  }

  void check(const char* tile, const std::vector<uint16_t>& out) {
    for (int i = 0; i < q.m; i++)
      for (int j = 0; j < q.epilogue.out_step; j++) check_one(tile, out[i * q.epilogue.out_step + j], i, j);
  }

  // The product without its bias, and what its terms would come to without their signs.
  struct Exact {
    double value, magnitude;
  };
  Exact exact_at(int i, int j) {
    double sum = 0, magnitude = 0;
    for (int l = 0; l < q.k; l++) {
      const double term =
          emulated::value_of<In>(x.data()[i * x.step + l]) * emulated::value_of<In>(weight.data()[j * weight.step + l]);
      sum += term;
      magnitude += std::fabs(term);
    }
    if (q.epilogue.zeros) sum -= static_cast<double>(zeros[i]) * weight_sums[j];
    const double scale = static_cast<double>(scale_x[i]) * scale_w[j];
    return {sum * scale, magnitude * scale};
  }

 private:
  void check_one(const char* tile, uint16_t found, int i, int j) {
    if (j >= q.n) {
      if (found != kUnwritten) stop(tile, i, j, found, kUnwritten);
      return;
    }
    const Exact exact = exact_at(i, j);
    const double expected = exact.value + bias[j];
    const double got = __uint_as_float(uint32_t{found} << 16);
    const double slack = kAllowed * std::fabs(expected) + 1e-6 * exact.magnitude + 1e-9;
    if (!(std::fabs(got - expected) <= slack)) stop(tile, i, j, got, expected);
    compared++;
  }

  [[noreturn]] void stop(const char* tile, int i, int j, double found, double expected) {
    std::fprintf(stderr, "%s, %d x %d x %d, tile of %s tokens: (%d, %d) is %g, expected %g\n",
                 kIsInt8 ? "int8" : "e4m3", q.m, q.n, q.k, tile, i, j, found, expected);
    std::exit(1);
  }
};

// The tiles of int8.cu and fp8.cu.
using Few = MmaTile<16, 64, 128, 16, 16, 4>;
using Some = MmaTile<64, 64, 128, 32, 32, 3>;
template <class In>
using Many =
    std::conditional_t<std::is_same_v<In, int8_t>, MmaTile<128, 128, 64, 64, 64, 4>, MmaTile<128, 128, 128, 64, 32, 3>>;

template <class In, class Tile>
void test(const char* tile, int m, int n, int k, bool shifted = false) {
  Product<In> product(m, n, k, shifted);
  product.check(tile, product.template run<Tile>());
}

template <class In>
void test_tiles(bool shifted) {
  test<In, Few>("16", 16, 16, 16, shifted);
  test<In, Few>("16", 9, 80, 144, shifted);
  test<In, Few>("16", 1, 144, 1040, shifted);
  test<In, Some>("64", 50, 80, 144, shifted);
  test<In, Some>("64", 70, 112, 784, shifted);
  test<In, Many<In>>("128", 130, 144, 144, shifted);
  test<In, Many<In>>("128", 140, 80, 912, shifted);
}

// A token's bits are those of any tile. A bias takes off nearly all of it, so that the last bits of its sum show.
template <class In>
void test_bits() {
  Product<In> product(1, 112, 656, false);
  for (int j = 0; j < product.q.n; j++) product.bias[j] = -product.exact_at(0, j).value;
  const auto expected = product.template run<Few>();
  product.check("16", expected);
  if (product.template run<Some>() == expected && product.template run<Many<In>>() == expected) return;
  std::fprintf(stderr, "the bits of a token depend on the tile\n");
  std::exit(1);
}

}  // namespace

int main(int, char** arguments) {
  generator.seed(std::atoi(arguments[1]));
  test_tiles<int8_t>(false);
  test_tiles<int8_t>(true);
  test_tiles<e4m3>(false);
  test<int8_t, Many<int8_t>>("128", 1100, 16, 80);  // a band, and one tile of the next
  test_bits<int8_t>();
  test_bits<e4m3>();
  std::printf("%d\n", compared);
}
