// Where a token of a paged cache begins: 32 bits that lanes pass on in one shuffle, for pages that lie anywhere in
// memory.
//
// Offsets are counted in units, the largest step that divides both strides: page * strides.page + slot * strides.token,
// and only the address is computed in 64 bits, by one wide multiplication. The values of a token are a unit where its
// cache is dense, so 2^32 units are 64 GiB even of tokens of 16 bytes, and 8 TiB at 8 heads of 128 dimensions in 16
// bits: also of the view that a layer has of pages which hold all layers.
#pragma once

#include <cstdint>
#include <numeric>

#include "common/error.h"

namespace radix::sm90 {

// Of keys, or of values.
struct CacheStrides {
  uint32_t page = 0, token = 0;  // in units
  uint32_t unit = 16;            // bytes

  __device__ uint32_t offset(int page_id, int slot) const { return page_id * page + slot * token; }
  // The product in assembly: the compiler would add the upper half of the unit, which is 0.
  __device__ const char* address(const char* base, uint32_t offset) const {
    uint64_t bytes;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(bytes) : "r"(offset), "r"(unit));
    return base + bytes;
  }
};

// Strides in bytes. Those that lead nowhere, of one page or of pages of one token, count for nothing.
inline CacheStrides cache_strides(const char* op, int64_t pages, int64_t page_size, int64_t page, int64_t token) {
  const int64_t page_step = pages > 1 ? page : 0, token_step = page_size > 1 ? token : 0;
  if (page_step < 0 || token_step < 0) fail(RK_UNSUPPORTED, "%s: the cache has a negative stride", op);
  int64_t unit = std::gcd(page_step, token_step);
  if (unit == 0) return {};
  if (unit > UINT32_MAX) unit = std::gcd(unit, int64_t{1} << 31);
  const uint64_t last = (pages - 1) * (page_step / unit) + (page_size - 1) * (token_step / unit);
  if (last > UINT32_MAX)
    fail(RK_UNSUPPORTED, "%s: a cache of more than %.0f GiB at strides whose common divisor is %lld bytes", op,
         static_cast<double>(unit) * 4, static_cast<long long>(unit));
  return {static_cast<uint32_t>(page_step / unit), static_cast<uint32_t>(token_step / unit),
          static_cast<uint32_t>(unit)};
}

}  // namespace radix::sm90
