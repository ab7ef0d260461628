#include "code_object.h"

#include <elf.h>

#include <algorithm>
#include <cstring>

#include "fault.h"
#include "metadata.h"

namespace gcn {
namespace {

constexpr unsigned kMachine = 224;      // EM_AMDGPU
constexpr unsigned kMetadataNote = 32;  // NT_AMDGPU_METADATA
constexpr uint32_t kDescriptorBytes = 64;

struct Target {
  unsigned code;
  const char* name;
};
constexpr Target kTargets[] = {{0x3f, "gfx90a"}, {0x4c, "gfx942"}, {0x4f, "gfx950"}};

template <class T>
T read(const std::vector<uint8_t>& bytes, uint64_t at) {
  if (at + sizeof(T) > bytes.size()) fault("code object: cut short");
  T value;
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

void load_segments(CodeObject& object, const Elf64_Ehdr& header) {
  for (unsigned i = 0; i < header.e_phnum; i++) {
    const auto segment = read<Elf64_Phdr>(object.elf, header.e_phoff + i * sizeof(Elf64_Phdr));
    if (segment.p_type != PT_LOAD) continue;
    if (segment.p_offset + segment.p_filesz > object.elf.size()) fault("code object: a segment is cut short");
    object.image.resize(std::max<size_t>(object.image.size(), segment.p_vaddr + segment.p_memsz));
    std::memcpy(object.image.data() + segment.p_vaddr, object.elf.data() + segment.p_offset, segment.p_filesz);
  }
}

Value read_metadata(const CodeObject& object, const Elf64_Ehdr& header) {
  for (unsigned i = 0; i < header.e_phnum; i++) {
    const auto segment = read<Elf64_Phdr>(object.elf, header.e_phoff + i * sizeof(Elf64_Phdr));
    if (segment.p_type != PT_NOTE) continue;
    uint64_t at = segment.p_offset;
    while (at < segment.p_offset + segment.p_filesz) {
      const auto note = read<Elf64_Nhdr>(object.elf, at);
      const uint64_t data = at + sizeof note + (note.n_namesz + 3) / 4 * 4;
      if (note.n_type == kMetadataNote) return read_message(object.elf.data() + data, note.n_descsz);
      at = data + (note.n_descsz + 3) / 4 * 4;
    }
  }
  fault("code object: no metadata");
}

std::map<std::string, uint64_t> read_symbols(const CodeObject& object, const Elf64_Ehdr& header) {
  std::map<std::string, uint64_t> symbols;
  for (unsigned i = 0; i < header.e_shnum; i++) {
    const auto table = read<Elf64_Shdr>(object.elf, header.e_shoff + i * sizeof(Elf64_Shdr));
    if (table.sh_type != SHT_DYNSYM) continue;
    const auto names = read<Elf64_Shdr>(object.elf, header.e_shoff + table.sh_link * sizeof(Elf64_Shdr));
    for (uint64_t at = 0; at < table.sh_size; at += sizeof(Elf64_Sym)) {
      const auto symbol = read<Elf64_Sym>(object.elf, table.sh_offset + at);
      symbols[reinterpret_cast<const char*>(object.elf.data()) + names.sh_offset + symbol.st_name] = symbol.st_value;
    }
  }
  return symbols;
}

Kernel read_kernel(const CodeObject& object, const Value& facts, uint64_t descriptor) {
  Kernel kernel;
  kernel.name = facts[".name"].text;
  if (facts[".wavefront_size"].number != 64) fault("%s: a wave is not 64 lanes", kernel.name.c_str());
  kernel.max_threads = static_cast<uint32_t>(facts[".max_flat_workgroup_size"].number);
  if (facts.has(".args")) {
    for (const Value& a : facts[".args"].items) {
      const auto offset = static_cast<uint32_t>(a[".offset"].number);
      kernel.arguments.push_back({a[".value_kind"].text, offset, static_cast<uint32_t>(a[".size"].number)});
    }
  }
  // The kernel descriptor, as LLVM's "User Guide for AMDGPU Backend" has it.
  if (descriptor + kDescriptorBytes > object.image.size()) fault("%s: no kernel descriptor", kernel.name.c_str());
  kernel.lds_bytes = read<uint32_t>(object.image, descriptor);
  kernel.scratch_bytes = read<uint32_t>(object.image, descriptor + 4);
  kernel.argument_bytes = read<uint32_t>(object.image, descriptor + 8);
  kernel.entry = descriptor + read<int64_t>(object.image, descriptor + 16);
  const auto rsrc3 = read<uint32_t>(object.image, descriptor + 44);
  const auto rsrc1 = read<uint32_t>(object.image, descriptor + 48);
  kernel.rsrc2 = read<uint32_t>(object.image, descriptor + 52);
  kernel.properties = read<uint16_t>(object.image, descriptor + 56);
  kernel.vgprs = ((rsrc1 & 63) + 1) * 8;
  kernel.first_agpr = ((rsrc3 & 63) + 1) * 4;
  return kernel;
}

// Calls visit(target, begin, bytes) for the entries of a bundle that are device code.
template <class Visit>
void each_entry(const char* bundle, Visit visit) {
  constexpr std::string_view kMagic = "__CLANG_OFFLOAD_BUNDLE__";
  if (std::string_view(bundle, kMagic.size()) != kMagic) fault("not an offload bundle (a compressed one?)");
  uint64_t count = 0;
  std::memcpy(&count, bundle + kMagic.size(), sizeof count);
  const char* entry = bundle + kMagic.size() + sizeof count;
  for (uint64_t i = 0; i < count; i++) {
    uint64_t head[3];  // offset, size, length of the name
    std::memcpy(head, entry, sizeof head);
    const std::string_view triple(entry + sizeof head, head[2]);
    entry += sizeof head + head[2];
    const size_t dashes = triple.rfind("--");
    if (triple.substr(0, 3) == "hip" && dashes != triple.npos && head[1])
      visit(triple.substr(dashes + 2), bundle + head[0], head[1]);
  }
}

}  // namespace

CodeObject read_code_object(const void* elf, size_t bytes) {
  CodeObject object;
  const auto* begin = static_cast<const uint8_t*>(elf);
  object.elf.assign(begin, begin + bytes);
  const auto header = read<Elf64_Ehdr>(object.elf, 0);
  if (std::memcmp(header.e_ident, ELFMAG, SELFMAG) != 0 || header.e_machine != kMachine)
    fault("code object: not an ELF file for AMD GPUs");
  for (const Target& target : kTargets)
    if (target.code == (header.e_flags & 0xff)) object.target = target.name;
  if (object.target.empty()) fault("code object: unknown GPU target 0x%x", header.e_flags & 0xff);
  load_segments(object, header);
  const auto symbols = read_symbols(object, header);
  const Value metadata = read_metadata(object, header);
  for (const Value& facts : metadata["amdhsa.kernels"].items) {
    const auto symbol = symbols.find(facts[".symbol"].text);
    if (symbol == symbols.end()) fault("code object: no symbol %s", facts[".symbol"].text.c_str());
    const Kernel kernel = read_kernel(object, facts, symbol->second);
    object.kernels.emplace(kernel.name, kernel);
  }
  return object;
}

std::string_view find_in_bundle(const char* bundle, std::string_view target) {
  std::string_view found;
  each_entry(bundle, [&](std::string_view name, const char* begin, uint64_t bytes) {
    if (name.substr(0, name.find(':')) == target) found = {begin, bytes};
  });
  return found;
}

std::vector<std::string> targets_of_bundle(const char* bundle) {
  std::vector<std::string> found;
  each_entry(bundle, [&](std::string_view name, const char*, uint64_t) { found.emplace_back(name); });
  return found;
}

}  // namespace gcn
