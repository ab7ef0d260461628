// Reads memory as fast as plain code can: four streams with software prefetch, a sum that the compiler must keep.
#include <stddef.h>
#include <stdint.h>

uint64_t read_all(const uint64_t* data, size_t words) {
  const size_t quarter = words / 4;
  uint64_t sum[4][8] = {{0}};
  for (size_t i = 0; i + 8 <= quarter; i += 8)
    for (int s = 0; s < 4; s++) {
      const uint64_t* line = data + s * quarter + i;
      __builtin_prefetch(line + 512, 0, 0);
      for (int j = 0; j < 8; j++) sum[s][j] += line[j];
    }
  uint64_t all = 0;
  for (int s = 0; s < 4; s++)
    for (int j = 0; j < 8; j++) all += sum[s][j];
  return all;
}
