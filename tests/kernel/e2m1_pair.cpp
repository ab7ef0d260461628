// The codes of mxfp4 as Hopper's layout holds them: of each line "word word" of the input, the codes of two steps in
// nibbles, the two words that are stored; the codes out of these; and the eight registers of the product's operand.
#include "sm90/linear/layout.cuh"

#include <cstdio>

int main() {
  using radix::linear::E2m1Pair;
  uint32_t steps[2];
  while (std::scanf("%x %x", &steps[0], &steps[1]) == 2) {
    const E2m1Pair packed = E2m1Pair::of_nibbles(steps), stored(packed.word(0), packed.word(1));
    std::printf("%x %x %x %x", stored.word(0), stored.word(1), stored.nibbles(0), stored.nibbles(1));
    for (int i = 0; i < 8; i++) std::printf(" %x", E2m1Pair::rotated(stored.source(i), 2 * i) & E2m1Pair::kMask);
    std::printf("\n");
  }
}
