// Runs llvm-objdump on a code object.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <sstream>

#include "fault.h"
#include "program.h"

namespace gcn {
namespace {

std::string setting(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value && *value ? value : otherwise;
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return file ? text.str() : "";
}

void write_file(const std::string& path, const void* data, size_t bytes) {
  std::ofstream file(path, std::ios::binary);
  file.write(static_cast<const char*>(data), static_cast<std::streamsize>(bytes));
  if (!file) fault("%s cannot be written", path.c_str());
}

std::string output_of(const std::string& command) {
  FILE* pipe = popen(command.c_str(), "r");
  if (!pipe) fault("%s cannot be run", command.c_str());
  std::string text;
  char part[1 << 16];
  for (size_t n; (n = std::fread(part, 1, sizeof part, pipe)) > 0;) text.append(part, n);
  if (pclose(pipe) != 0) fault("%s failed", command.c_str());
  return text;
}

uint64_t hash(const std::vector<uint8_t>& bytes) {  // FNV-1a
  uint64_t h = 0xcbf29ce484222325;
  for (const uint8_t b : bytes) h = (h ^ b) * 0x100000001b3;
  return h;
}

struct Listings {
  std::mutex mutex;
  std::map<uint64_t, std::string> by_hash;
};

Listings& listings() {
  static Listings all;
  return all;
}

}  // namespace

void keep_listing(const std::vector<uint8_t>& elf, const char* text) {
  const std::lock_guard lock(listings().mutex);
  listings().by_hash[hash(elf)] = text;
}

std::string disassemble(const CodeObject& object) {
  {
    const std::lock_guard lock(listings().mutex);
    const auto given = listings().by_hash.find(hash(object.elf));
    if (given != listings().by_hash.end()) return given->second;
  }
  const std::string folder = setting("GCN_CACHE", "/tmp");
  char name[64];
  std::snprintf(name, sizeof name, "/gcn-%s-%016lx", object.target.c_str(), hash(object.elf));
  const std::string kept = folder + name + ".s";
  std::string text = read_file(kept);
  if (!text.empty()) return text;
  const std::string own = folder + name + "." + std::to_string(getpid());
  const auto objdump = [&](const std::vector<uint8_t>& elf, const std::string& target) {
    write_file(own, elf.data(), elf.size());
    const std::string program = setting("LLVM_OBJDUMP", "llvm-objdump-19");
    const std::string listing = output_of(program + " -d --mcpu=" + target + " " + own);
    unlink(own.c_str());
    return listing;
  };
  if (object.target == "gfx950") {
    text = disassemble_gfx950(object.elf, [&](const auto& elf) { return objdump(elf, "gfx942"); });
  } else {
    text = objdump(object.elf, object.target);
  }
  if (std::getenv("GCN_CACHE")) {
    write_file(own, text.data(), text.size());
    if (std::rename(own.c_str(), kept.c_str()) != 0) fault("%s cannot be written", kept.c_str());
  }
  return text;
}

}  // namespace gcn
