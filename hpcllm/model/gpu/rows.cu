// What kernels share that take a row of values (a token) a group: sums over the lanes, in one order.
//
// Macro: VALUE (common.cuh).

typedef VALUE::Word Word;
const u32 AHEAD = 4;              // quads that a lane loads before it uses the first
const u32 SPAN = AHEAD * STEP;    // values that a group takes at once

// The sum of x over all lanes: the same bits in each, since a pair adds the same two.
DEVICE float sum_of_lanes(float x) {
  for (u32 mask = 1; mask < GROUP; mask *= 2) x += float_of(shuffle_xor(bits_of(x), mask));
  return x;
}

DEVICE float max_of_lanes(float x) {
  for (u32 mask = 1; mask < GROUP; mask *= 2) {
    float other = float_of(shuffle_xor(bits_of(x), mask));
    x = x < other ? other : x;
  }
  return x;
}
