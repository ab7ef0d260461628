#include <sched.h>

#include <algorithm>
#include <cstring>

#include "fault.h"
#include "machine.h"

namespace gcn {
namespace {

using Kind = Operand::Kind;

// Registers that nobody has written: no number that a result could be right with.
constexpr uint32_t kUnwritten = 0x7fbadbad;
// Register files of ended waves, for the next ones of the thread: a fresh one costs more than many a wave.
std::vector<std::unique_ptr<Lanes[]>>& spare_registers() {
  thread_local std::vector<std::unique_ptr<Lanes[]>> spare;
  return spare;
}

Lanes* take_registers() {
  auto& spare = spare_registers();
  if (spare.empty()) return new Lanes[kVectorRows];
  Lanes* rows = spare.back().release();
  spare.pop_back();
  return rows;
}

constexpr uint64_t kImageBase = 0x7e00'0000'0000;  // of code, for s_getpc: never dereferenced

}  // namespace

Wave::Wave(Program& program_, const Kernel& kernel_, Memory& memory_, Block& block_, unsigned number_, unsigned lanes)
    : program(program_),
      kernel(kernel_),
      memory(memory_),
      block(block_),
      number(number_),
      registers_(take_registers()) {
  for (unsigned i = 0; i < kernel.first_agpr; i++) registers_[i].fill(kUnwritten);
  for (unsigned i = 0; i + kernel.first_agpr < kernel.vgprs; i++) registers_[kAgprs + i].fill(kUnwritten);
  s.fill(kUnwritten);
  all_ = lanes == kLanes ? ~uint64_t{0} : (uint64_t{1} << lanes) - 1;
  set_exec(all_);
  s[kVcc] = s[kVcc + 1] = 0;
  next_ = program.index_of(kernel.entry);
}

void Wave::Return::operator()(Lanes* rows) const {
  spare_registers().emplace_back(rows);
}

uint32_t Wave::scalar(const Operand& op) const {
  switch (op.kind) {
    case Kind::kScalar: return s[op.index];
    case Kind::kLiteral: return static_cast<uint32_t>(op.integer);
    case Kind::kScc: return scc;
    default: fault("a scalar operand was expected");
  }
}

uint64_t Wave::scalar_pair(const Operand& op) const {
  if (op.kind == Kind::kScalar) return s[op.index] | uint64_t{s[op.index + 1]} << 32;
  if (op.kind == Kind::kLiteral) return static_cast<uint64_t>(op.integer);
  return scalar(op);
}

void Wave::set_scalar(const Operand& op, uint32_t value) {
  if (op.kind == Kind::kNone) return;
  if (op.kind != Kind::kScalar) fault("a scalar destination was expected");
  s[op.index] = value;
  if (op.index >= kExec) set_exec(s[kExec] | uint64_t{s[kExec + 1]} << 32);
}

void Wave::set_scalar_pair(const Operand& op, uint64_t value) {
  if (op.kind == Kind::kNone) return;
  if (op.kind != Kind::kScalar) fault("a scalar destination was expected");
  s[op.index] = static_cast<uint32_t>(value);
  s[op.index + 1] = static_cast<uint32_t>(value >> 32);
  if (op.index == kExec) set_exec(value);
}

void Wave::set_exec(uint64_t mask) {
  exec_ = mask;
  s[kExec] = static_cast<uint32_t>(mask);
  s[kExec + 1] = static_cast<uint32_t>(mask >> 32);
  for (unsigned l = 0; l < 32; l++) live[l] = -(s[kExec] >> l & 1);
  for (unsigned l = 0; l < 32; l++) live[32 + l] = -(s[kExec + 1] >> l & 1);
}

// Word `word` of an operand in every lane. `hold` is used where the operand has no such row.
const uint32_t* Wave::source(const Operand& op, unsigned word, Lanes& hold) {
  const uint32_t* row = nullptr;
  switch (op.kind) {
    case Kind::kVector: row = registers_[op.index + word].data(); break;
    case Kind::kLiteral: row = word ? op.high : op.low; break;
    case Kind::kScalar:
      hold.fill(s[op.index + word]);
      row = hold.data();
      break;
    case Kind::kScc:
      hold.fill(word ? 0 : scc);
      row = hold.data();
      break;
    case Kind::kNone: fault("an operand is missing");
  }
  return row;
}

void Wave::issued(Queue queue, const Operand* result, unsigned words) {
  Outstanding entry{queue != Queue::kScalar, 0, 0};
  if (result) {
    entry.first = static_cast<uint16_t>(result->index + (result->kind == Kind::kScalar ? kVectorRows : 0));
    entry.words = static_cast<uint16_t>(words);
    for (unsigned i = 0; i < words; i++) pending_[entry.first + i]++;
  }
  (queue == Queue::kVector ? vector_queue_ : lgkm_queue_).push_back(entry);
  outstanding_++;
  if (vector_queue_.size() > kMostOutstanding) retire(vector_queue_);
}

void Wave::retire(std::deque<Outstanding>& queue) {
  const Outstanding entry = queue.front();
  queue.pop_front();
  outstanding_--;
  for (unsigned i = 0; i < entry.words; i++) pending_[entry.first + i]--;
}

// Vector memory comes back in order, LDS too; scalar loads do not, so only a wait for all of them helps.
void Wave::wait(unsigned vmcnt, unsigned lgkmcnt) {
  while (vector_queue_.size() > vmcnt) retire(vector_queue_);
  const bool in_order =
      std::all_of(lgkm_queue_.begin(), lgkm_queue_.end(), [](const Outstanding& o) { return o.in_order; });
  if (lgkmcnt && !in_order) return;
  while (lgkm_queue_.size() > lgkmcnt) retire(lgkm_queue_);
}

void Wave::check_pending(const Instruction& in) const {
  const auto check = [&](const Operand& op) {
    if (op.kind != Kind::kVector && op.kind != Kind::kScalar) return;
    const unsigned first = op.index + (op.kind == Kind::kScalar ? kVectorRows : 0);
    for (unsigned i = 0; i < op.count; i++)
      if (pending_[first + i])
        fault("%c%u is used before s_waitcnt says that it was loaded", op.kind == Kind::kScalar ? 's' : 'v',
              op.index + i);
  };
  for (unsigned i = in.in_order ? 1 : 0; i < in.operands; i++) check(in.op[i]);
  if (!in.around) return;
  for (const Operand& op : in.around->source) check(op);
  check(in.around->target);
}

bool Wave::run(uint64_t limit) {
  const Instruction* code = program.code.data();
  const size_t size = program.code.size();
  at_barrier_ = false;
  try {
    while (!ended_ && !at_barrier_) {
      if (next_ >= size) fault("the program runs past its end");
      const Instruction& in = code[next_];
      current = &in;
      next_ = in.next;
      if (++count > limit) fault("%lu instructions in one wave: an endless loop?", limit);
      if (!in.problem.empty()) fault("%s", in.problem.c_str());
      if (outstanding_) check_pending(in);
      __atomic_store_n(&in.executed, uint8_t{1}, __ATOMIC_RELAXED);
      if (in.around)
        run_rearranged(in);
      else
        in.run(*this, in);
      if (in.clamped || in.multiplier) place(in);
      if (polled_ && (count & 1023) == 0) sched_yield();
    }
  } catch (const Fault& problem) {
    fault("%s [%s at 0x%lx of %s, block %u %u %u, wave %u]", problem.what(), current->name.c_str(), current->address,
          kernel.name.c_str(), block.id[0], block.id[1], block.id[2], number);
  }
  return !ended_;
}

uint64_t Wave::image_address(uint64_t address) const {
  return kImageBase + address;
}

void Wave::jump(uint64_t address) {
  next_ = program.index_of(address - kImageBase);
}

uint8_t* Wave::scratch(unsigned lane, int64_t offset, uint32_t bytes) {
  const uint32_t size = kernel.scratch_bytes;
  if (offset < 0 || offset + bytes > size)
    fault("scratch access of %u bytes at %ld, a lane has %u", bytes, offset, size);
  if (scratch_.empty()) scratch_.assign(size_t{size} * kLanes, 0xba);
  return scratch_.data() + size_t{size} * lane + offset;
}

// The lane that each lane's operand comes from, and for which lanes there is one.
uint64_t Wave::select_lanes(const Rearrangement& around, Operand source, uint32_t* out) {
  Lanes hold;
  source.negated = source.magnitude = false;
  Lanes in;
  std::copy_n(this->source(source, 0, hold), kLanes, in.data());
  uint64_t valid = 0;
  const int n = around.distance;
  for (int l = 0; l < static_cast<int>(kLanes); l++) {
    const int row = l & ~15, at = l & 15;
    int from = l;
    bool there = true;
    switch (around.permutation) {
      case Permutation::kNone: break;
      case Permutation::kQuad: from = (l & ~3) + around.quad[l & 3]; break;
      case Permutation::kRowShiftLeft:
        from = l + n;
        there = at + n < 16;
        break;
      case Permutation::kRowShiftRight:
        from = l - n;
        there = at >= n;
        break;
      case Permutation::kRowRotate: from = row + ((at - n) & 15); break;
      case Permutation::kRowMirror: from = row + 15 - at; break;
      case Permutation::kHalfMirror: from = (l & ~7) + 7 - (l & 7); break;
      case Permutation::kBroadcast15:
        from = row - 1;
        there = row > 0;
        break;
      case Permutation::kBroadcast31:
        from = 31;
        there = l >= 32;
        break;
      case Permutation::kNewBroadcast: from = row + n; break;
      case Permutation::kWaveShiftLeft:
        from = l + 1;
        there = l < 63;
        break;
      case Permutation::kWaveShiftRight:
        from = l - 1;
        there = l > 0;
        break;
      case Permutation::kWaveRotate: from = (l - 1) & 63; break;
    }
    there = there && (exec_ >> (from & 63) & 1);
    out[l] = there ? in[from & 63] : 0;
    const bool enabled = (around.row_mask >> (l / 16) & 1) && (around.bank_mask >> (at / 4) & 1);
    if (enabled && (there || around.zero_outside)) valid |= uint64_t{1} << l;
  }
  return valid;
}

void Wave::run_rearranged(const Instruction& in) {
  const Rearrangement& around = *in.around;
  if (!around.sdwa) {
    const uint64_t before = exec_;
    const uint64_t valid = select_lanes(around, around.source[0], vector(kRearranged));
    set_exec(before & valid);
    in.run(*this, in);
    set_exec(before);
    return;
  }
  for (unsigned k = 0; k < 2; k++) {
    if (around.source[k].kind == Kind::kNone) continue;
    Lanes hold;
    const uint32_t* row = source(around.source[k], 0, hold);
    const Selection from = around.from[k];
    uint32_t* out = vector(kRearranged + k);
    for (unsigned l = 0; l < kLanes; l++) {
      const uint32_t field = row[l] << (32 - from.bits - from.shift);
      out[l] = around.source[k].extended ? static_cast<uint32_t>(static_cast<int32_t>(field) >> (32 - from.bits))
                                         : field >> (32 - from.bits);
    }
  }
  in.run(*this, in);
  if (!around.writes_vector || around.to.bits == 32) return;
  const uint32_t mask = ((1u << around.to.bits) - 1) << around.to.shift;
  const uint32_t* result = vector(kUnplaced);
  uint32_t* out = vector(around.target.index);
  for (unsigned l = 0; l < kLanes; l++) {
    const uint32_t rest = around.keeps_rest ? out[l] & ~mask : 0;
    if (live[l]) out[l] = (result[l] << around.to.shift & mask) | rest;
  }
}

// clamp, mul: and div: of an instruction with a result of one float; integers are clamped where they are added.
void Wave::place(const Instruction& in) {
  const std::string& name = in.name;
  const bool single =
      name.size() > 4 && name.compare(name.size() - 4, 4, "_f32") == 0 && name.find("_pk_") == name.npos;
  if (!single) {
    if (name == "v_add_u32" || name == "v_sub_u32") return;
    fault("clamp on %s", name.c_str());
  }
  uint32_t* out = vector(in.op[0].index);
  for (unsigned l = 0; l < kLanes; l++) {
    if (!live[l]) continue;
    float value;
    std::memcpy(&value, &out[l], sizeof value);
    if (in.multiplier) value *= in.multiplier == 1 ? 2.0f : in.multiplier == 2 ? 4.0f : 0.5f;
    if (in.clamped) value = value > 0 ? std::min(value, 1.0f) : 0.0f;
    std::memcpy(&out[l], &value, sizeof value);
  }
}

}  // namespace gcn
