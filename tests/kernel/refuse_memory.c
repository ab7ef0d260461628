/* Preloaded into a process, refuses memory from a size on once it is told to. */
#include <stddef.h>
#include <stdint.h>

extern void* __libc_malloc(size_t bytes);
extern void* __libc_memalign(size_t alignment, size_t bytes);

static volatile size_t plain_from = SIZE_MAX, aligned_from = SIZE_MAX;

/* Sizes at which malloc and aligned_alloc begin to fail. */
void refuse_memory(size_t plain, size_t aligned) {
  plain_from = plain;
  aligned_from = aligned;
}

void* malloc(size_t bytes) { return bytes >= plain_from ? NULL : __libc_malloc(bytes); }

void* aligned_alloc(size_t alignment, size_t bytes) {
  return bytes >= aligned_from ? NULL : __libc_memalign(alignment, bytes);
}
