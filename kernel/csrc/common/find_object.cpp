// The static unwinder of gcc 12 and later asks glibc for _dl_find_object, which is newer (2.35) than the glibc this
// wheel promises to run on (2.34). It gets this one instead, by dl_iterate_phdr; exceptions are on error paths only.
// Linked into the library and into each binding, never exported.
#include <dlfcn.h>
#include <link.h>

#include <cstdint>

#ifdef DLFO_STRUCT_HAS_EH_DBASE

static_assert(!DLFO_STRUCT_HAS_EH_DBASE, "written for targets without a data base in dl_find_object (x86-64)");

namespace {

struct Search {
  uintptr_t pc;
  dl_find_object* found;
};

int visit(dl_phdr_info* info, size_t, void* data) {
  const auto& search = *static_cast<Search*>(data);
  bool inside = false;
  uintptr_t begin = UINTPTR_MAX, end = 0, eh_frame = 0;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& header = info->dlpi_phdr[i];
    const uintptr_t start = info->dlpi_addr + header.p_vaddr, stop = start + header.p_memsz;
    if (header.p_type == PT_GNU_EH_FRAME) eh_frame = start;
    if (header.p_type != PT_LOAD) continue;
    inside |= search.pc >= start && search.pc < stop;
    begin = start < begin ? start : begin;
    end = stop > end ? stop : end;
  }
  if (!inside || !eh_frame) return 0;
  search.found->dlfo_map_start = reinterpret_cast<void*>(begin);
  search.found->dlfo_map_end = reinterpret_cast<void*>(end);
  search.found->dlfo_eh_frame = reinterpret_cast<void*>(eh_frame);
  return 1;
}

}  // namespace

// 0 when pc lies in a loaded object with unwind tables, -1 otherwise.
extern "C" int _dl_find_object(void* pc, dl_find_object* found) noexcept {
  *found = {};
  Search search{reinterpret_cast<uintptr_t>(pc), found};
  return dl_iterate_phdr(visit, &search) ? 0 : -1;
}

#endif
