#include "rocm/hip_choice.h"

#include <elf.h>
#include <glob.h>
#include <link.h>
#include <sys/stat.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#ifndef RK_ROCM_PARENT
#define RK_ROCM_PARENT "/opt"
#endif

namespace radix::hip {

namespace {

constexpr char kRuntime[] = "libamdhip64.so";
constexpr char kTorch[] = "libtorch_hip.so";
const char* const kSonames[] = {"libamdhip64.so.7", "libamdhip64.so.6"};  // ROCm 7 to 10, ROCm 6

struct Library {
  std::string path;
  uintptr_t base = 0, begin = 0, end = 0;  // where it is loaded
  const ElfW(Dyn) * dynamic = nullptr;
};
struct Loaded {
  std::vector<Library> runtimes, torches;
};

Library describe(const dl_phdr_info& info) {
  Library library;
  library.path = info.dlpi_name;
  library.base = info.dlpi_addr;
  library.begin = UINTPTR_MAX;
  for (int i = 0; i < info.dlpi_phnum; i++) {
    const ElfW(Phdr)& segment = info.dlpi_phdr[i];
    const uintptr_t begin = info.dlpi_addr + segment.p_vaddr;
    if (segment.p_type == PT_DYNAMIC) library.dynamic = reinterpret_cast<const ElfW(Dyn)*>(begin);
    if (segment.p_type != PT_LOAD) continue;
    library.begin = std::min(library.begin, begin);
    library.end = std::max(library.end, begin + segment.p_memsz);
  }
  return library;
}

int collect(dl_phdr_info* info, size_t, void* out) {
  const char* slash = std::strrchr(info->dlpi_name, '/');
  const char* name = slash ? slash + 1 : info->dlpi_name;
  auto* loaded = static_cast<Loaded*>(out);
  if (std::strncmp(name, kRuntime, sizeof kRuntime - 1) == 0) loaded->runtimes.push_back(describe(*info));
  if (std::strncmp(name, kTorch, sizeof kTorch - 1) == 0) loaded->torches.push_back(describe(*info));
  return 0;
}

int count_loads(dl_phdr_info* info, size_t, void* out) {
  *static_cast<uint64_t*>(out) = info->dlpi_adds;
  return 1;  // the first says it
}

bool same_file(const std::string& a, const std::string& b) {
  struct stat first, second;
  if (stat(a.c_str(), &first) || stat(b.c_str(), &second)) return false;
  return first.st_dev == second.st_dev && first.st_ino == second.st_ino;
}

// The loader has put addresses into a library's dynamic section, or left offsets from its base.
uintptr_t address_of(const Library& library, ElfW(Addr) value) {
  return value < library.base ? library.base + value : value;
}

// The runtime that a table of the loader's references points into; nullptr for none.
const Library* target_of(const Library& user, uintptr_t table, size_t bytes, const std::vector<Library>& runtimes) {
  const auto* entries = reinterpret_cast<const ElfW(Rela)*>(table);
  for (size_t i = 0; i < bytes / sizeof *entries; i++) {
    const auto type = ELF64_R_TYPE(entries[i].r_info);
    if (type != R_X86_64_JUMP_SLOT && type != R_X86_64_GLOB_DAT) continue;
    const uintptr_t value = *reinterpret_cast<const uintptr_t*>(user.base + entries[i].r_offset);
    for (const Library& runtime : runtimes)
      if (value >= runtime.begin && value < runtime.end) return &runtime;
  }
  return nullptr;
}

// The runtime that a library calls, as the loader has resolved it: names and search orders would only be a guess.
const Library* runtime_of(const Library& user, const std::vector<Library>& runtimes) {
  uintptr_t functions = 0, data = 0;
  size_t function_bytes = 0, data_bytes = 0;
  for (const ElfW(Dyn)* entry = user.dynamic; entry && entry->d_tag != DT_NULL; entry++) {
    if (entry->d_tag == DT_JMPREL) functions = address_of(user, entry->d_un.d_ptr);
    if (entry->d_tag == DT_PLTRELSZ) function_bytes = entry->d_un.d_val;
    if (entry->d_tag == DT_RELA) data = address_of(user, entry->d_un.d_ptr);
    if (entry->d_tag == DT_RELASZ) data_bytes = entry->d_un.d_val;
  }
  const Library* found = target_of(user, functions, function_bytes, runtimes);
  return found ? found : target_of(user, data, data_bytes, runtimes);
}

Choice take(const std::string& path, bool settled) {
  Choice choice;
  choice.paths = {path};
  choice.settled = settled;
  return choice;
}

Choice refuse(const std::string& problem) {
  Choice choice;
  choice.problem = problem;
  return choice;
}

std::string list(const std::vector<Library>& libraries) {
  std::string text;
  for (const Library& library : libraries) text += (text.empty() ? "" : " and ") + library.path;
  return text;
}

// By its file, or by its name alone where the path is no more than that.
const Library* find(const std::vector<Library>& libraries, const std::string& path) {
  const bool is_name = path.find('/') == path.npos;
  for (const Library& library : libraries) {
    const std::string name = library.path.substr(library.path.rfind('/') + 1);
    if (is_name ? name == path : same_file(library.path, path)) return &library;
  }
  return nullptr;
}

Choice choose_loaded(const Loaded& loaded, const char* wanted, const std::vector<std::string>& bundled) {
  const std::vector<Library>& runtimes = loaded.runtimes;
  if (wanted) {
    if (const Library* found = find(runtimes, wanted)) return take(found->path, true);
    return refuse(std::string("RADIX_LIBHIP is ") + wanted + ", but the process has loaded " + list(runtimes));
  }
  for (const Library& torch : loaded.torches)
    if (const Library* found = runtime_of(torch, runtimes)) return take(found->path, true);
  if (runtimes.size() == 1) return take(runtimes[0].path, false);
  for (const std::string& path : bundled)
    if (const Library* found = find(runtimes, path)) return take(found->path, false);
  return refuse("two HIP runtimes are loaded, and torch uses neither: " + list(runtimes) +
                "; RADIX_LIBHIP=<path> names the one to use");
}

bool newer(const std::string& a, const std::string& b) {
  return strverscmp(a.c_str(), b.c_str()) > 0;
}

std::vector<std::string> folders_like(const char* pattern) {
  std::vector<std::string> found;
  glob_t matches;
  if (glob(pattern, GLOB_NOSORT, nullptr, &matches) == 0)
    found.assign(matches.gl_pathv, matches.gl_pathv + matches.gl_pathc);
  globfree(&matches);
  std::sort(found.begin(), found.end(), newer);
  return found;
}

void add_folder(std::vector<std::string>& paths, const std::string& folder) {
  for (const char* soname : kSonames) paths.push_back(folder + "/" + soname);
}

std::vector<std::string> system_paths() {
  std::vector<std::string> paths;
  if (const char* rocm = std::getenv("ROCM_PATH")) add_folder(paths, std::string(rocm) + "/lib");
  for (const char* soname : kSonames) paths.push_back(soname);
  for (const char* pattern :
       {RK_ROCM_PARENT "/rocm/lib", RK_ROCM_PARENT "/rocm-*/lib", RK_ROCM_PARENT "/rocm/core-*/lib"})
    for (const std::string& folder : folders_like(pattern)) add_folder(paths, folder);
  return paths;
}

}  // namespace

Choice choose(const std::vector<std::string>& bundled) {
  Loaded loaded;
  dl_iterate_phdr(collect, &loaded);
  const char* wanted = std::getenv("RADIX_LIBHIP");
  if (!loaded.runtimes.empty()) return choose_loaded(loaded, wanted, bundled);
  if (wanted) return take(wanted, false);
  Choice choice;
  choice.paths = bundled;
  const std::vector<std::string> system = system_paths();
  choice.paths.insert(choice.paths.end(), system.begin(), system.end());
  return choice;
}

uint64_t libraries_loaded() {
  uint64_t count = 0;
  dl_iterate_phdr(count_loads, &count);
  return count;
}

}  // namespace radix::hip
