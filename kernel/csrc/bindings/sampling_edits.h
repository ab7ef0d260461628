// The edits of a draw, as Python hands them over.
#pragma once

#include "bindings/exchange.h"

namespace radix::bind {

// A tuple in the order of the struct's members, None where a step is left out.
template <class Args>
void read_edits(Call& call, const py::tuple& edits, Args& args) {
  struct Member {
    const char* name;
    const rk_tensor* Args::* place;
  };
  constexpr Member kMembers[] = {
      {"bias_ids", &Args::bias_ids}, {"bias_values", &Args::bias_values}, {"counts", &Args::counts},
      {"slots", &Args::slots},       {"repetition", &Args::repetition},   {"frequency", &Args::frequency},
      {"presence", &Args::presence}, {"stop_ids", &Args::stop_ids},       {"min_position", &Args::min_position},
      {"bitmask", &Args::bitmask}};
  size_t i = 0;
  for (const Member& member : kMembers) args.*member.place = call.optional_in(member.name, edits[i++]);
}

}  // namespace radix::bind
