#include "metadata.h"

#include "fault.h"

namespace gcn {
namespace {

class Reader {
 public:
  Reader(const uint8_t* data, size_t bytes) : at_(data), end_(data + bytes) {}

  Value value() {
    const uint8_t tag = byte();
    Value v;
    if (tag < 0x80) {
      v.number = tag;
    } else if (tag < 0x90) {
      read_fields(v, tag & 15);
    } else if (tag < 0xa0) {
      read_items(v, tag & 15);
    } else if (tag < 0xc0) {
      v.text = text(tag & 31);
    } else {
      read_long(v, tag);
    }
    return v;
  }

 private:
  void read_long(Value& v, uint8_t tag) {
    switch (tag) {
      case 0xc0:
      case 0xc2: v.number = 0; break;
      case 0xc3: v.number = 1; break;
      case 0xcc:
      case 0xcd:
      case 0xce:
      case 0xcf: v.number = static_cast<int64_t>(number(1u << (tag - 0xcc))); break;
      case 0xd0: v.number = static_cast<int8_t>(number(1)); break;
      case 0xd1: v.number = static_cast<int16_t>(number(2)); break;
      case 0xd2: v.number = static_cast<int32_t>(number(4)); break;
      case 0xd3: v.number = static_cast<int64_t>(number(8)); break;
      case 0xd9:
      case 0xda:
      case 0xdb: v.text = text(number(1u << (tag - 0xd9))); break;
      case 0xdc:
      case 0xdd: read_items(v, number(2u << (tag - 0xdc))); break;
      case 0xde:
      case 0xdf: read_fields(v, number(2u << (tag - 0xde))); break;
      default: fault("metadata: MessagePack type 0x%02x", tag);
    }
  }

  void read_items(Value& v, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) v.items.push_back(value());
  }

  void read_fields(Value& v, uint64_t count) {
    for (uint64_t i = 0; i < count; i++) {
      const std::string name = value().text;
      v.fields[name] = value();
    }
  }

  uint8_t byte() {
    if (at_ == end_) fault("metadata: cut short");
    return *at_++;
  }

  uint64_t number(unsigned bytes) {  // big end first
    uint64_t n = 0;
    for (unsigned i = 0; i < bytes; i++) n = n << 8 | byte();
    return n;
  }

  std::string text(uint64_t bytes) {
    std::string s;
    for (uint64_t i = 0; i < bytes; i++) s += static_cast<char>(byte());
    return s;
  }

  const uint8_t* at_;
  const uint8_t* end_;
};

}  // namespace

const Value& Value::operator[](const std::string& name) const {
  const auto found = fields.find(name);
  if (found == fields.end()) fault("metadata: no %s", name.c_str());
  return found->second;
}

Value read_message(const uint8_t* data, size_t bytes) {
  return Reader(data, bytes).value();
}

}  // namespace gcn
