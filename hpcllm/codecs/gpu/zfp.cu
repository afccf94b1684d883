// `zfp:rate`: codecs/zfp.py draws a block, codecs/zfp_planes.py the code of its planes. A lane takes a block of 4 values,
// so a group 128 values, whose blocks end at a multiple of 32 bits whatever the rate: its words are its own.
//
//     4 values --fixed point, lift, base -2--> 4 x 32 bits --transpose--> planes, highest first --code--> 4 x RATE bits
//     lanes    --shuffle--> words of 32 bits, lane beside lane, to memory
//
// Planes are kept in the order of the code: bit i of nibble j is coefficient i's bit 31 - j. What is left of them when all
// four coefficients have been non-zero goes into the code by a shift. No shared memory; about 100 instructions of PTX
// a value, against 4 + RATE / 8 bytes: arithmetic costs an H100 about as much as memory (reckoned, not measured).
//
// Macros: VALUE (common.cuh); RATE: bits a value, 3 to 32.

typedef VALUE::Word Word;

const u32 BITS = 4 * RATE;            // of a block
const u32 WORDS = GROUP * BITS / 32;  // of a group
const u32 HEADER_BITS = 9;            // the lowest says that there is more to come; 8 bits of exponent + 127
const u32 NOT_FINITE = 1;             // more to come, but exponent field 0: no zfp encoder writes it
const u32 LEAST = (127 - 98) << 23;   // 2^-98: below it zfp's own scale factor overflows
const u32 NEGABINARY = 0xAAAAAAAA;

struct Coefficients { u32 at[4]; };
struct Floats { float at[4]; };
struct Code { u64 low, high; }; // 128 bits, of which BITS count

// -- 128 bits ------------------------------------------------------------------------------------------------------------

// By 0 to 127.
DEVICE Code left(Code x, u32 by) {
  if (by >= 64) return {0, x.low << (by - 64)};
  return {x.low << by, x.high << by | x.low >> 1 >> (63 - by)};
}

DEVICE Code right(Code x, u32 by) {
  if (by >= 64) return {x.high >> (by - 64), 0};
  return {x.low >> by | x.high << 1 << (63 - by), x.high >> by};
}

DEVICE Code either(Code x, Code y) { return {x.low | y.low, x.high | y.high}; }

// The first 1 to 128 bits.
DEVICE Code cut(Code x, u32 bits) {
  if (bits <= 64) return {x.low & ~(u64)0 >> (64 - bits), 0};
  return {x.low, x.high & ~(u64)0 >> (128 - bits)};
}

// Zeros below the lowest 1; 128 if there is none.
DEVICE u32 zeros_below(Code x) {
  u64 word = x.low ? x.low : x.high;
  u32 half = (u32)word ? first_one((u32)word) : 32 + first_one((u32)(word >> 32));
  return x.low ? half : 64 + half;
}

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

// Exchanges the bits of two places, of those in the mask and those `by` above.
DEVICE u32 exchanged(u32 x, u32 by, u32 mask) {
  u32 differences = (x >> by ^ x) & mask;
  return x ^ differences ^ differences << by;
}

// Bit 8 r + c <-> bit 4 c + r: four bytes, and eight nibbles that have a bit of each.
DEVICE u32 nibbles_of(u32 x) {
  x = exchanged(exchanged(x, 12, 0x0000F0F0), 6, 0x00CC00CC);
  return exchanged(exchanged(x, 3, 0x0A0A0A0A), 1, 0x22222222);
}
DEVICE u32 bytes_of(u32 x) {
  x = exchanged(exchanged(x, 1, 0x22222222), 3, 0x0A0A0A0A);
  return exchanged(exchanged(x, 6, 0x00CC00CC), 12, 0x0000F0F0);
}

// Byte i of word j <-> byte j of word i.
DEVICE Coefficients transposed(Coefficients c) {
#pragma unroll
  for (u32 i = 0; i < 2; i++) {
    u32 t = (c.at[i] >> 16 ^ c.at[i + 2]) & 0xFFFF;
    c.at[i] ^= t << 16, c.at[i + 2] ^= t;
  }
#pragma unroll
  for (u32 i = 0; i < 4; i += 2) {
    u32 t = (c.at[i] >> 8 ^ c.at[i + 1]) & 0x00FF00FF;
    c.at[i] ^= t << 8, c.at[i + 1] ^= t;
  }
  return c;
}

DEVICE Code planes_of(Coefficients c) {
#pragma unroll
  for (u32 i = 0; i < 4; i++) c.at[i] = reversed((c.at[i] + NEGABINARY) ^ NEGABINARY);
  c = transposed(c);
#pragma unroll
  for (u32 i = 0; i < 4; i++) c.at[i] = nibbles_of(c.at[i]);
  return {c.at[0] | (u64)c.at[1] << 32, c.at[2] | (u64)c.at[3] << 32};
}

DEVICE Coefficients coefficients_of(Code planes) {
  Coefficients c = {{(u32)planes.low, (u32)(planes.low >> 32), (u32)planes.high, (u32)(planes.high >> 32)}};
#pragma unroll
  for (u32 i = 0; i < 4; i++) c.at[i] = bytes_of(c.at[i]);
  c = transposed(c);
#pragma unroll
  for (u32 i = 0; i < 4; i++) c.at[i] = (reversed(c.at[i]) ^ NEGABINARY) - NEGABINARY;
  return c;
}

// -- the code of planes --------------------------------------------------------------------------------------------------

// The code of a plane when `state` coefficients have been non-zero, which are more after it. Its length is in `bits`.
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

// The first `budget` bits of the code, 1 to 119.
DEVICE Code encoded(Code planes, u32 budget) {
  u32 zeros = zeros_below(planes) / 4, at = zeros, state = 0;
  if (zeros >= 32) return {0, 0};
  Code code = {0, 0};
  for (planes = right(planes, 4 * zeros); state < 4 && at < budget && (planes.low | planes.high); planes = right(planes, 4)) {
    u32 bits, plane = code_of((u32)planes.low & 15, state, bits);
    code = either(code, left({plane, 0}, at));
    at += bits;
  }
  if (at < budget) code = either(code, left(planes, at));
  return cut(code, budget);
}

// The next bit, if there is one; `missing` if not.
DEVICE u32 next_bit(Code& code, u32& bits_left, u32 missing) {
  if (bits_left == 0) return missing;
  u32 bit = (u32)code.low & 1;
  code = right(code, 1);
  bits_left--;
  return bit;
}

// The next plane. A code that ends too early still sets the 1 that it was looking for.
DEVICE u32 plane_of(Code& code, u32& bits_left, u32& state) {
  u32 plane = 0;
  for (u32 i = 0; i < state; i++) plane |= next_bit(code, bits_left, 0) << i;
  while (state < 4 && next_bit(code, bits_left, 0)) {
    while (state < 3 && !next_bit(code, bits_left, 1)) state++;
    plane |= 1 << state++;
  }
  return plane;
}

// All planes that `budget` bits of code stand for. Bits after those are zeros.
DEVICE Code decoded(Code code, u32 budget) {
  u32 zeros = zeros_below(code), row = zeros, bits_left = budget - zeros, state = 0;
  if (zeros >= 32 || zeros >= budget) return {0, 0};
  Code planes = {0, 0};
  for (code = right(code, zeros); row < 32 && state < 4 && bits_left > 0; row++)
    planes = either(planes, left({plane_of(code, bits_left, state), 0}, 4 * row));
  return row < 32 ? either(planes, left(code, 4 * row)) : planes;
}

// -- blocks --------------------------------------------------------------------------------------------------------------

DEVICE u32 magnitude(float x) { return bits_of(x) & MAGNITUDE; }

DEVICE Code block_of(Floats x) {
  u32 peak = 0;
#pragma unroll
  for (u32 i = 0; i < 4; i++) peak = greatest(peak, magnitude(x.at[i]));
  if (peak < LEAST) return {0, 0};
  if (peak >= INFINITE) return {NOT_FINITE, 0};
  float scale = float_of((283 - (peak >> 23)) << 23); // 2^30 over the power of two above the peak
  Coefficients c;
#pragma unroll
  for (u32 i = 0; i < 4; i++) c.at[i] = (u32)(i32)(x.at[i] * scale); // towards zero
  Code code = left(encoded(planes_of(lift(c)), BITS - HEADER_BITS), HEADER_BITS);
  return {code.low | (2 * (peak >> 23) + 3), code.high};
}

// 2^(exponent - 30), below the normal numbers too.
DEVICE float scale_of(u32 field) {
  return float_of(field > 30 ? (field - 30) << 23 : field >= 8 ? 1u << (field - 8) : 0);
}

DEVICE Floats floats_of(Code block) {
  u32 header = (u32)block.low & 511;
  float nan = float_of(NOT_A_NUMBER), scale = scale_of(header >> 1);
  if (header == NOT_FINITE) return {{nan, nan, nan, nan}};
  if (header % 2 == 0) return {{0, 0, 0, 0}};
  Coefficients c = unlift(coefficients_of(decoded(right(block, HEADER_BITS), BITS - HEADER_BITS)));
  Floats x;
#pragma unroll
  for (u32 i = 0; i < 4; i++) x.at[i] = (float)(i32)c.at[i] * scale;
  return x;
}

// -- memory --------------------------------------------------------------------------------------------------------------

// `count` values from `values`; of fewer than four, as zfp fills them up: a -> aaaa, ab -> abba, abc -> abca.
DEVICE Floats load(const Word* values, u32 count) {
  Floats x;
  if (count == 4 && is_aligned(values)) {
    Four<Word> four = four_at(values);
#pragma unroll
    for (u32 i = 0; i < 4; i++) x.at[i] = VALUE::widened(four.at[i]);
    return x;
  }
#pragma unroll
  for (u32 i = 0; i < 4; i++) x.at[i] = VALUE::widened(values[i < count ? i : i == 3 || count == 1 ? 0 : 1]);
  return x;
}

// Word `place` of the group: bits of one block, or of the few that meet there.
DEVICE u32 word_of(Code mine, u32 place) {
  const u32 blocks = BITS % 32 ? 31 / BITS + 2 : 1; // at most
  u32 word = 0;
#pragma unroll
  for (u32 i = 0; i < blocks; i++) {
    u32 block = 32 * place / BITS + i, begin = block * BITS, end = 32 * place;
    u64 low = shuffle((u32)mine.low, block & 31) | (u64)shuffle((u32)(mine.low >> 32), block & 31) << 32;
    u64 high = BITS > 64 ? shuffle((u32)mine.high, block & 31) | (u64)shuffle((u32)(mine.high >> 32), block & 31) << 32 : 0;
    if (i == 0) word = (u32)right({low, high}, end - begin).low;
    else if (begin - end < 32) word |= (u32)low << (begin - end);
  }
  return word;
}

// words: of the whole encoding.
KERNEL encode(const Word* __restrict__ values, u64 n, u32* __restrict__ out, u64 words, u64 groups) {
  if (group() >= groups) return;
  u64 first = 4 * (group() * GROUP + lane());
  Code mine = {0, 0};
  if (first < n) mine = block_of(load(values + first, (u32)least(n - first, (u64)4)));
#pragma unroll
  for (u32 row = 0; row < WORDS; row += GROUP) {
    u32 place = row + lane(), word = word_of(mine, place % WORDS);
    if (place < WORDS && group() * WORDS + place < words) out[group() * WORDS + place] = word;
  }
}

// The block at bit BITS * block: it lies in so many words, the last of which may be beyond the end.
DEVICE Floats block_at(const u32* data, u64 words, u64 block) {
  const u32 most = (BITS + 31 + 28) / 32;
  u64 start = block * BITS / 32;
  u32 shift = (u32)(block * BITS % 32), word[most];
#pragma unroll
  for (u32 i = 0; i < most; i++) word[i] = start + i < words ? data[start + i] : 0;
  Code code = {word[0], 0};
#pragma unroll
  for (u32 i = 1; i < most && i < 4; i++) code = either(code, left({word[i], 0}, 32 * i));
  code = right(code, shift);
  if (most > 4 && shift) code.high |= (u64)word[most - 1] << (64 - shift);
  return floats_of(cut(code, BITS));
}

template <class Element, class Put> DEVICE void decode_to(const u32* data, u64 words, u64 n, Element* out, Put put) {
  u64 block = group() * GROUP + lane(), first = 4 * block;
  if (first >= n) return;
  Floats x = block_at(data, words, block);
  out += first;
  if (n - first >= 4 && is_aligned(out)) {
    Four<Element> four = put.reads ? four_at(out) : Four<Element>();
#pragma unroll
    for (u32 i = 0; i < 4; i++) four.at[i] = Put::of(four.at[i], x.at[i]);
    put_four(out, four);
    return;
  }
  for (u32 i = 0; i < 4 && first + i < n; i++) out[i] = Put::of(out[i], x.at[i]);
}

// What becomes of an element of the output.
struct Same {
  static const bool reads = false;
  DEVICE Word of(Word, float x) { return VALUE::narrowed(x); }
};
struct Plain {
  static const bool reads = false;
  DEVICE float of(float, float x) { return x; }
};
struct Sum {
  static const bool reads = true;
  DEVICE float of(float before, float x) { return before + x; }
};

KERNEL decode(Word* __restrict__ out, u64 n, const u32* __restrict__ data, u64 words, u64 groups) {
  if (group() < groups) decode_to(data, words, n, out, Same());
}

KERNEL decode_floats(float* __restrict__ out, u64 n, const u32* __restrict__ data, u64 words, u64 groups) {
  if (group() < groups) decode_to(data, words, n, out, Plain());
}

KERNEL decode_add(float* __restrict__ out, u64 n, const u32* __restrict__ data, u64 words, u64 groups) {
  if (group() < groups) decode_to(data, words, n, out, Sum());
}
