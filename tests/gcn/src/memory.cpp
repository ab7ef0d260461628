#include <algorithm>
#include <cstring>

#include "fault.h"
#include "machine.h"

namespace gcn {

void Memory::add(const void* begin, size_t bytes, bool writable) {
  const auto address = reinterpret_cast<uint64_t>(begin);
  if (bytes) regions_.push_back({address, address + bytes, writable});
}

void Memory::seal() {
  std::sort(regions_.begin(), regions_.end(), [](const Region& a, const Region& b) { return a.begin < b.begin; });
  std::vector<Region> joined;
  for (const Region& r : regions_) {
    if (!joined.empty() && r.begin < joined.back().end && r.writable == joined.back().writable)
      joined.back().end = std::max(joined.back().end, r.end);
    else
      joined.push_back(r);
  }
  regions_ = std::move(joined);
}

uint8_t* Memory::at(uint64_t address, uint32_t bytes, bool writes) {
  const auto inside = [&](const Region& r) { return address >= r.begin && address + bytes <= r.end; };
  if (last_ >= regions_.size() || !inside(regions_[last_])) {
    const auto after = std::upper_bound(regions_.begin(), regions_.end(), address,
                                        [](uint64_t a, const Region& r) { return a < r.begin; });
    if (after == regions_.begin() || !inside(*(after - 1)))
      fault("memory access outside of every buffer: %s of %u bytes at 0x%lx", writes ? "store" : "load", bytes,
            address);
    last_ = static_cast<size_t>(after - regions_.begin() - 1);
  }
  if (writes && !regions_[last_].writable) fault("store to read-only memory at 0x%lx", address);
  return reinterpret_cast<uint8_t*>(address);
}

Lds::Lds(uint32_t bytes, unsigned waves) : alone_(waves == 1), bytes_(bytes), written_(bytes), read_(bytes) {}

void Lds::check(uint64_t address, uint32_t bytes) const {
  if (address + bytes > bytes_.size() || address + bytes < address)
    fault("LDS access of %u bytes at %lu, the block has %zu", bytes, address, bytes_.size());
}

void Lds::load(uint64_t address, uint8_t* out, uint32_t bytes, unsigned wave) {
  check(address, bytes);
  const auto mine = static_cast<uint16_t>(interval_ | wave), shared = static_cast<uint16_t>(interval_ | kAtomic);
  for (uint64_t i = address; i < address + bytes; i++) {
    const uint16_t written = written_[i];
    if (!written) fault("read of LDS that nobody wrote, at %lu", i);
    if (written == shared && bytes <= kWord) continue;  // an atomic load looks like any other
    if (written != mine && recent(written))
      fault("LDS race at %lu: wave %u reads what another wrote, with no barrier between", i, wave);
    const uint16_t before = read_[i];
    if (before != mine) read_[i] = recent(before) ? static_cast<uint16_t>(before | kSeveral) : mine;
  }
  std::memcpy(out, bytes_.data() + address, bytes);
}

void Lds::store(uint64_t address, const uint8_t* data, uint32_t bytes, unsigned wave) {
  check(address, bytes);
  const auto mine = static_cast<uint16_t>(interval_ | wave);
  for (uint32_t k = 0; k < bytes; k++) {
    const uint64_t i = address + k;
    if (read_[i] != mine && recent(read_[i]))
      fault("LDS race at %lu: wave %u writes what another read, with no barrier between", i, wave);
    if (written_[i] != mine && recent(written_[i]) && bytes_[i] != data[k])
      fault("LDS race at %lu: wave %u writes what another wrote, with no barrier between", i, wave);
    written_[i] = mine;
  }
  std::memcpy(bytes_.data() + address, data, bytes);
}

uint8_t* Lds::atomic(uint64_t address, uint32_t bytes, unsigned wave) {
  check(address, bytes);
  const auto mine = static_cast<uint16_t>(interval_ | wave), shared = static_cast<uint16_t>(interval_ | kAtomic);
  for (uint64_t i = address; i < address + bytes; i++) {
    uint16_t& written = written_[i];
    if (!written) fault("atomic on LDS that nobody wrote, at %lu", i);
    const bool others = recent(written) && written != mine && written != shared;
    if (others) fault("LDS race at %lu: an atomic on what another wave wrote, with no barrier between", i);
    if (written != mine) written = alone_ ? mine : shared;
  }
  return bytes_.data() + address;
}

void Lds::barrier() {
  if (interval_ < 65535 - kStep) {
    interval_ = static_cast<uint16_t>(interval_ + kStep);
    return;
  }
  interval_ = kStep;
  for (uint16_t& tag : written_) tag = tag ? kOld : 0;
  std::fill(read_.begin(), read_.end(), 0);
}

}  // namespace gcn
