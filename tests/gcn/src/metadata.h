// The MessagePack that the metadata note of a code object is written in.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace gcn {

struct Value {
  int64_t number = 0;
  std::string text;
  std::vector<Value> items;
  std::map<std::string, Value> fields;

  const Value& operator[](const std::string& name) const;  // Fault when it is missing
  bool has(const std::string& name) const { return fields.count(name) != 0; }
};

Value read_message(const uint8_t* data, size_t bytes);

}  // namespace gcn
