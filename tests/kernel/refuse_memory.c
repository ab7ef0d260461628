/* Preloaded into a process, refuses memory from a size on once it is told to, and counts what is asked for. */
#include <errno.h>
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

static volatile size_t counted_from = SIZE_MAX;
static size_t requests;

/* How often memory was asked for, of the size given before; counts anew, for `bytes` or more. */
size_t count_memory(size_t bytes) {
  counted_from = bytes;
  return __atomic_exchange_n(&requests, 0, __ATOMIC_SEQ_CST);
}

static void note(size_t bytes) {
  if (bytes >= counted_from) __atomic_fetch_add(&requests, 1, __ATOMIC_SEQ_CST);
}

void* malloc(size_t bytes) {
  note(bytes);
  return bytes >= plain_from ? NULL : __libc_malloc(bytes);
}

void* aligned_alloc(size_t alignment, size_t bytes) {
  note(bytes);
  return bytes >= aligned_from ? NULL : __libc_memalign(alignment, bytes);
}

/* torch's; counted alone. */
int posix_memalign(void** out, size_t alignment, size_t bytes) {
  note(bytes);
  void* memory = __libc_memalign(alignment, bytes);
  if (!memory) return ENOMEM;
  *out = memory;
  return 0;
}
