// What a program has asked of the pretend device: operations, copies, events, and the times that the host waits for it.
//
// The device computes at once, so a wait is not measured in seconds but in operations: how many the host, which goes on when
// it returns, learns to be over. A wait for what the host knows to be over already is none.
#pragma once

#include "order.h"

namespace pretend {

struct Copied {
  int64_t count = 0, bytes = 0;
};

struct Blocked { // the host, at one place
  int64_t count = 0;
  order::Time longest = 0; // operations
};

struct Counts { // under the lock of events
  std::map<std::string, int64_t> operators; // launches, by name
  int64_t moved_bytes = 0; // of all tensors that these are handed, or make
  int64_t records = 0, waits = 0; // of events, by streams
  Copied to_device, to_host;
  std::map<std::pair<bool, order::Site>, Blocked> blocks; // true: of the program's thread, not of a lane's
};
inline auto& counts = *new Counts;

} // namespace pretend
