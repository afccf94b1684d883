// `zfp:rate`: codecs/zfp.py draws a block, codecs/zfp_planes.py the code of its planes; zfp_blocks.cuh has the kernels. A
// lane takes a block of 4 values, so a group 128 values, whose blocks end at a multiple of 32 bits whatever the rate: its
// words are its own.
//
//     4 values --fixed point, lift, base -2--> 4 x 32 bits --transpose--> planes, highest first --code--> 4 x RATE bits
//     lanes    --shuffle--> words of 32 bits, lane beside lane, to memory
//
// Planes are kept in the order of the code, from the first that is not zero: bit i of nibble j is coefficient i's bit
// 31 - zeros - j. From there a plane takes 2 bits and more, so at most half as many planes as bits count; for rates to 10
// these are 16, and half of the transpose is not done. A code is as wide as its rate needs: shifts are what it is made by,
// and those of 128 bits cost four times those of 32. What is left of the planes when three coefficients have been non-zero goes
// into the code by one shift. No shared memory.
//
// Macros: VALUE (common.cuh); RATE: bits a value, 3 to 32.

typedef VALUE::Word Word;

const u32 BITS = 4 * RATE;            // of a block
const u32 WORDS = GROUP * BITS / 32;  // of a group
const u32 HEADER_BITS = 9;            // the lowest says that there is more to come; 8 bits of exponent + 127
const u32 BUDGET = BITS - HEADER_BITS; // bits of the code of planes
const u32 NEGABINARY = 0xAAAAAAAA;

struct Coefficients { u32 at[4]; };

// -- 32, 64 or 128 bits --------------------------------------------------------------------------------------------------

struct Wide {
  u64 low, high;

  Wide() = default;
  METHOD Wide(u64 low, u64 high = 0) : low(low), high(high) {}
  template <class Number> METHOD explicit operator Number() const { return (Number)low; }
  METHOD Wide operator|(Wide y) const { return {low | y.low, high | y.high}; }
  METHOD Wide operator<<(u32 by) const { // 0 to 127
    if (by >= 64) return {0, low << (by - 64)};
    return {low << by, high << by | low >> 1 >> (63 - by)};
  }
  METHOD Wide operator>>(u32 by) const {
    if (by >= 64) return {high >> (by - 64), 0};
    return {low >> by | high << 1 << (63 - by), high >> by};
  }
};

template <bool FITS, class Small, class Large> struct Either { typedef Small Type; };
template <class Small, class Large> struct Either<false, Small, Large> { typedef Large Type; };
typedef Either<BITS <= 32, u32, Either<BITS <= 64, u64, Wide>::Type>::Type Code;
const u32 CODE_BITS = 8 * sizeof(Code);
const bool HALVED = BUDGET <= 32; // 16 planes are enough
typedef Either<HALVED, u64, Wide>::Type Planes;

// The first 1 to CODE_BITS bits.
DEVICE u32 cut(u32 x, u32 bits) { return x & ~0u >> (32 - bits); }
DEVICE u64 cut(u64 x, u32 bits) { return x & ~(u64)0 >> (64 - bits); }
DEVICE Wide cut(Wide x, u32 bits) { return bits <= 64 ? Wide{cut(x.low, bits)} : Wide{x.low, cut(x.high, bits - 64)}; }

// Zeros below the lowest 1; at least 32 where there are none lower.
DEVICE u32 zeros_below(u32 x) { return first_one(x); }
DEVICE u32 zeros_below(u64 x) { return first_one((u32)x); }
DEVICE u32 zeros_below(Wide x) { return first_one((u32)x.low); }

DEVICE bool is_zero(u64 x) { return x == 0; }
DEVICE bool is_zero(Wide x) { return (x.low | x.high) == 0; }

// -- coefficients --------------------------------------------------------------------------------------------------------

DEVICE u32 halved(u32 x) { return (u32)((i32)x >> 1); }

// 1/16 of (4 4 4 4 / 5 1 -1 -5 / -4 4 4 -4 / -2 6 -6 2) times the block, but for the bits that >> loses.
DEVICE Coefficients lift(Coefficients c) {
  u32 x = c.at[0], y = c.at[1], z = c.at[2], w = c.at[3];
  x = halved(x + w), w -= x;
  z = halved(z + y), y -= z;
  x = halved(x + z), z -= x;
  w = halved(w + y), y -= w;
  w += halved(y), y -= halved(w);
  return {{x, y, z, w}};
}

DEVICE Coefficients unlift(Coefficients c) {
  u32 x = c.at[0], y = c.at[1], z = c.at[2], w = c.at[3];
  y += halved(w), w -= halved(y);
  y += w, w = 2 * w - y;
  z += x, x = 2 * x - z;
  y += z, z = 2 * z - y;
  w += x, x = 2 * x - w;
  return {{x, y, z, w}};
}

// Exchanges bits of x: those of the mask and those `by` above.
DEVICE u32 exchanged(u32 x, u32 by, u32 mask) {
  u32 differences = (x >> by ^ x) & mask;
  return x ^ differences ^ differences << by;
}

// 16 bits each of four coefficients, 0 and 2 in one word, 1 and 3 in the other: bits of the same place in turn to nibbles.
// First within 4 x 4 bits, then with nibbles for bits.
DEVICE u64 nibbles_of(u32 even, u32 odd) {
  exchange(even, odd, 1, 0x55555555);
  even = exchanged(even, 14, 0x0000CCCC), odd = exchanged(odd, 14, 0x0000CCCC);
  exchange(even, odd, 4, 0x0F0F0F0F);
  even = exchanged(even, 8, 0x0000FF00), odd = exchanged(odd, 8, 0x0000FF00);
  return (even & 0xFFFF) | odd << 16 | (u64)(even >> 16 | (odd & 0xFFFF0000)) << 32;
}
DEVICE void halves_of(u64 nibbles, u32& even, u32& odd) {
  u32 low = (u32)nibbles, high = (u32)(nibbles >> 32);
  even = (low & 0xFFFF) | high << 16, odd = low >> 16 | (high & 0xFFFF0000);
  even = exchanged(even, 8, 0x0000FF00), odd = exchanged(odd, 8, 0x0000FF00);
  exchange(even, odd, 4, 0x0F0F0F0F);
  even = exchanged(even, 14, 0x0000CCCC), odd = exchanged(odd, 14, 0x0000CCCC);
  exchange(even, odd, 1, 0x55555555);
}

DEVICE u64 reversed(u64 x) { return reversed((u32)(x >> 32)) | (u64)reversed((u32)x) << 32; }

// The highest 16 planes of coefficients, and the others. All is reversed at the end, so coefficients come last to first.
DEVICE u64 high_planes(Coefficients c) {
  return reversed(nibbles_of(c.at[3] >> 16 | (c.at[1] & 0xFFFF0000), c.at[2] >> 16 | (c.at[0] & 0xFFFF0000)));
}
DEVICE u64 low_planes(Coefficients c) {
  return reversed(nibbles_of((c.at[3] & 0xFFFF) | c.at[1] << 16, (c.at[2] & 0xFFFF) | c.at[0] << 16));
}
DEVICE void set_planes(u64& planes, Coefficients c) { planes = high_planes(c); }
DEVICE void set_planes(Wide& planes, Coefficients c) { planes = {high_planes(c), low_planes(c)}; }

DEVICE Coefficients coefficients_of(u64 planes) {
  u32 even, odd;
  halves_of(reversed(planes), even, odd);
  return {{odd & 0xFFFF0000, even & 0xFFFF0000, odd << 16, even << 16}};
}
DEVICE Coefficients coefficients_of(Wide planes) {
  Coefficients high = coefficients_of(planes.low), low = coefficients_of(planes.high);
  return {{high.at[0] | low.at[0] >> 16, high.at[1] | low.at[1] >> 16, high.at[2] | low.at[2] >> 16, high.at[3] | low.at[3] >> 16}};
}

// -- the code of planes --------------------------------------------------------------------------------------------------

// When three coefficients have been non-zero, a plane's code is its 4 bits: three as they are, and whether there is more,
// which is the fourth's bit itself.
const u32 VERBATIM = 3;

// The code of a plane in which coefficients become non-zero, after `state` that have been, which are more after it. Its
// length is in `bits`.
DEVICE u32 code_of(u32 plane, u32& state, u32& bits) {
  u32 code = plane & ((1 << state) - 1);
  bits = state;
  while (state < 4) {
    u32 more = plane >> state != 0;
    code |= more << bits++;
    if (!more) break;
    u32 passed = first_one(plane >> state); // zeros, a bit each; then a 1, but for the fourth's, which goes without saying
    bits += passed;
    state += passed;
    if (state < 3) code |= 1 << bits++;
    state++;
  }
  return code;
}

// The first BUDGET bits of the code of coefficients in base -2.
DEVICE Code encoded(Coefficients c) {
  u32 zeros = leading_zeros(c.at[0] | c.at[1] | c.at[2] | c.at[3]), at = zeros, state = 0;
  if (zeros >= least(BUDGET, 32u)) return 0;
  for (u32 i = 0; i < 4; i++) c.at[i] <<= zeros;
  Planes planes;
  set_planes(planes, c);
  Code code = 0;
  for (; state < VERBATIM && at < BUDGET && !is_zero(planes); planes = planes >> 4) {
    u32 plane = (u32)planes & 15, bits = state + 1; // a 0 after those that have been
    if (plane >> state) plane = code_of(plane, state, bits);
    code = code | (Code)plane << at;
    at += bits;
  }
  if (at < BUDGET) code = code | (Code)planes << at;
  return cut(code, BUDGET);
}

// The next plane, from at most 7 bits of `code`. It ends after `bits_left`: a code that ends too early still sets the 1 that
// it was looking for. Returns the bits that were taken in `bits`.
DEVICE u32 plane_of(u32 code, i32 bits_left, u32& state, u32& bits) {
  u32 plane = code & ((1 << state) - 1);
  bits = state;
  while (state < 4 && code >> bits & 1) {
    u32 behind = bits_left < 7 ? ~0u << bits_left : 0;
    bits++;
    u32 passed = first_one((code | behind) >> bits | 8 >> state); // the fourth's 1 goes without saying
    state += passed;
    bits += passed + (state < 3);
    plane |= 1 << state++;
  }
  bits += state < 4;
  return plane;
}

// The coefficients in base -2 that BUDGET bits of code stand for. Bits after those are zeros.
DEVICE Coefficients decoded(Code code) {
  u32 zeros = zeros_below(code), at = 0, state = 0, bits;
  if (zeros >= least(BUDGET, 32u)) return {{0, 0, 0, 0}};
  Planes planes = 0;
  code = code >> zeros;
  for (i32 bits_left = (i32)(BUDGET - zeros); state < VERBATIM && bits_left > 0 && at < 128 - 4 * zeros; at += 4) {
    planes = planes | (Planes)plane_of((u32)code, bits_left, state, bits) << at;
    code = code >> bits;
    bits_left -= (i32)bits;
  }
  if (at < 128 - 4 * zeros && at < 8 * sizeof(Planes)) planes = planes | (Planes)code << at;
  Coefficients c = coefficients_of(planes);
  for (u32 i = 0; i < 4; i++) c.at[i] >>= zeros;
  return c;
}
