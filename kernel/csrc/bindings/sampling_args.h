// The settings and edits of a draw, as Python hands them over. They bear the same names in every args struct.
#pragma once

#include "bindings/exchange.h"

namespace radix::bind {

template <class Args>
void read_settings(Call& call, Args& args, uint32_t stream, py::handle temperature, py::handle top_k, py::handle top_p,
                   py::handle min_p, py::handle seed, py::handle position) {
  args.draw_stream = stream;
  args.temperature = call.in("temperature", temperature);
  args.top_k = call.in("top_k", top_k);
  args.top_p = call.in("top_p", top_p);
  args.min_p = call.in("min_p", min_p);
  args.seed = call.in("seed", seed);
  args.position = call.in("position", position);
}

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
