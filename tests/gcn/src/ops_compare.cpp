// Vector compares: a bit a lane, into a pair of scalar registers.
#include "lanes.h"

namespace gcn {
namespace {

// Bits of the class mask, from bit 0: signalling NaN, quiet NaN, -inf, -normal, -denormal, -0, +0, +denormal, +normal,
// +inf.
template <class T, class Bits, unsigned quiet>
bool in_class(T x, u32 mask) {
  const bool negative = std::signbit(x);
  unsigned which = 0;
  switch (std::fpclassify(x)) {
    case FP_NAN: which = std::bit_cast<Bits>(x) >> quiet & 1 ? 1 : 0; break;
    case FP_INFINITE: which = negative ? 2 : 9; break;
    case FP_NORMAL: which = negative ? 3 : 8; break;
    case FP_SUBNORMAL: which = negative ? 4 : 7; break;
    default: which = negative ? 5 : 6; break;
  }
  return mask >> which & 1;
}

#define OF_TYPE(name, T, sign) {"v_cmp_" name, lanes<[](T a, T b) -> bool { return (a sign b); }>}
#define INTEGERS(name, sign)                                                                         \
  OF_TYPE(name "_u32", u32, sign), OF_TYPE(name "_i32", i32, sign), OF_TYPE(name "_u64", u64, sign), \
      OF_TYPE(name "_i64", i64, sign), OF_TYPE(name "_u16", uint16_t, sign), OF_TYPE(name "_i16", int16_t, sign)
#define REALS(name, condition)                                                                 \
  {"v_cmp_" name "_f32", lanes<[](float a, float b) -> bool { return (condition); }>},         \
      {"v_cmp_" name "_f64", lanes<[](double a, double b) -> bool { return (condition); }>}, { \
    "v_cmp_" name "_f16", lanes<[](half a, half b) -> bool { return (condition); }>            \
  }

}  // namespace

void add_compare(Table& t) {
  const Entry entries[] = {
      INTEGERS("lt", <),
      INTEGERS("eq", ==),
      INTEGERS("le", <=),
      INTEGERS("gt", >),
      INTEGERS("ne", !=),
      INTEGERS("ge", >=),
      REALS("lt", a < b),
      REALS("eq", a == b),
      REALS("le", a <= b),
      REALS("gt", a > b),
      REALS("lg", (a < b) | (a > b)),
      REALS("ge", a >= b),
      REALS("o", (a == a) & (b == b)),
      REALS("u", (a != a) | (b != b)),
      REALS("nge", !(a >= b)),
      REALS("nlg", !((a < b) | (a > b))),
      REALS("ngt", !(a > b)),
      REALS("nle", !(a <= b)),
      REALS("neq", a != b),
      REALS("nlt", !(a < b)),
      {"v_cmp_class_f32", lanes<[](float x, u32 mask) { return (in_class<float, u32, 22>(x, mask)); }>},
      {"v_cmp_class_f64", lanes<[](double x, u32 mask) { return (in_class<double, u64, 51>(x, mask)); }>},
  };
  t.insert(t.end(), std::begin(entries), std::end(entries));
}

}  // namespace gcn
