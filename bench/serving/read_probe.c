// Reads memory as fast as plain code can: four streams with software prefetch, and sums that the compiler must keep.
#include <stddef.h>
#include <stdint.h>

typedef uint64_t Half __attribute__((vector_size(32), aligned(8)));  // of a cache line

uint64_t read_all(const uint64_t* data, size_t words) {
  enum { kStreams = 4, kAhead = 2048 / 8 };
  const size_t each = words / kStreams / 8 * 8;
  Half low[kStreams] = {{0}}, high[kStreams] = {{0}};
  for (size_t i = 0; i < each; i += 8)
    for (int s = 0; s < kStreams; s++) {
      const uint64_t* line = data + s * each + i;
      __builtin_prefetch(line + kAhead);
      low[s] += *(const Half*)line;
      high[s] += *(const Half*)(line + 4);
    }
  Half all = {0};
  for (int s = 0; s < kStreams; s++) all += low[s] + high[s];
  return all[0] + all[1] + all[2] + all[3];
}
