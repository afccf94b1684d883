// int8, int4 and fp8 on a device: the arithmetic of codecs/quantise.py.
//
//     values   q q q q ..  q     quads of 4 values: a lane takes one, the next lane the next one
//     step     128 values        what a group takes at once
//     block    a step, several steps, or the quads of the first 8 or 16 lanes of a step and so on
//
//     encode   values wait in registers while the lanes of a block find its absmax, then become codes: one pass over memory
//     sum      the same, with values that are sums of what ranks sent
//
// WHOLE: all values of the group are there, at addresses for 16 or 8 bytes at once. The other code is for the last group, and
// for arrays at odd places: no branch stands between the loads of the first.
//
// Macros: VALUE (common.cuh); CODE: Int8, Int4 or Fp8; BLOCK: values of a block; STOCHASTIC: 0 or 1.

const u32 LANES = BLOCK < STEP ? BLOCK / QUAD : GROUP; // that share a block
const u32 STEPS = BLOCK < STEP ? 1 : BLOCK / STEP;     // of a group
const u32 MOST_HELD = 8;                               // steps whose values wait in registers; others are read twice
const u32 MOST_SUMS = 2;                               // sums that wait there; others do so in memory, as my own addend

typedef VALUE::Word Word;

// -- codes ---------------------------------------------------------------------------------------------------------------

DEVICE u64 mixed(u64 z) {
  z = (z ^ z >> 33) * 0xFF51AFD7ED558CCDull;
  z = (z ^ z >> 33) * 0xC4CEB9FE1A85EC53ull;
  return z ^ z >> 33;
}

DEVICE u64 block_seed(u64 key, u64 place) { return mixed(mixed(key + 0x9E3779B97F4A7C15ull) + place); }

DEVICE float floor_randomly(float x, u64 seed, u32 i) {
  u32 z = i * 0x9E3779B9u + (u32)seed;
  z = ((z ^ z >> 16) * 0x7FEB352Du) ^ (u32)(seed >> 32);
  z = (z ^ z >> 15) * 0x846CA68Bu;
  z ^= z >> 16;
  return floor_of(x + (float)(i32)(z >> 8) * float_of(0x33800000)); // 2^-24
}

// The low bits are x as a whole number, plus those of `magic`, near which fp32 has steps of 1. i: place in the block.
DEVICE u32 whole(float x, float top, u64 seed, u32 i, float magic) {
  if (STOCHASTIC) {
    float code = floor_randomly(x, seed, i);
    x = code < -top ? -top : code > top ? top : code;
  }
  return bits_of(x + magic);
}

struct Int8 {
  typedef u32 Packed; // the codes of a quad
  static constexpr u32 BITS = 8, ZEROS = 0, STEPS_BITS = 0x42FE0001; // above 127
  DEVICE u32 code(float x, u64 seed, u32 i) { return whole(x, 127, seed, i, 12582912.0f) & 0xFF; }
  DEVICE float value(u32 code) { return (float)(i32)(signed char)code; }
};

struct Int4 {
  typedef u16 Packed;
  static constexpr u32 BITS = 4, ZEROS = 0x8888, STEPS_BITS = 0x40E00001; // above 7
  DEVICE u32 code(float x, u64 seed, u32 i) { return whole(x, 7, seed, i, 12582912.0f + 8) & 0xF; }
  DEVICE float value(u32 code) { return (float)((i32)code - 8); }
};

struct Fp8 {
  typedef u32 Packed;
  static constexpr u32 BITS = 8, ZEROS = 0, STEPS_BITS = 0x43E00001; // above 448
  static constexpr u32 BIAS = 120 << 23;                             // between the exponents of both formats
  DEVICE u32 code(float x, u64, u32) {
    u32 bits = bits_of(x), size = bits & MAGNITUDE;
    u32 normal = (size - BIAS + 0x7FFFF + (size >> 20 & 1)) >> 20;
    u32 low = bits_of(float_of(size) + 16384.0f) - 0x46800000; // fp32 has steps of 2^-9 there
    return (size < 0x3C800000 ? low : normal) | (bits >> 24 & 0x80);
  }
  DEVICE float value(u32 code) {
    u32 size = code & 0x7F, low = bits_of((float)(i32)size * float_of(0x3B000000)); // 2^-9
    u32 number = size < 8 ? low : (size << 20) + BIAS;
    return float_of((size == 0x7F ? NOT_A_NUMBER : number) | (code & 0x80) << 24);
  }
};

// -- codes in memory -----------------------------------------------------------------------------------------------------

DEVICE u64 code_bytes(u64 n) { return (n * CODE::BITS + 7) / 8; }

template <bool WHOLE> DEVICE u32 codes_at(const u8* data, u64 first, u64 n) {
  const u8* codes = data + code_bytes(first);
  if (WHOLE) return *(const CODE::Packed*)codes;
  u32 packed = 0;
  for (u32 k = 0; k < sizeof(CODE::Packed) && code_bytes(first) + k < code_bytes(n); ++k) packed |= (u32)codes[k] << 8 * k;
  return packed;
}

template <bool WHOLE> DEVICE void put_codes(u8* data, u64 first, u64 n, u32 packed) {
  u8* codes = data + code_bytes(first);
  if (WHOLE) {
    *(CODE::Packed*)codes = (CODE::Packed)packed;
  } else {
    for (u32 k = 0; k < sizeof(CODE::Packed) && code_bytes(first) + k < code_bytes(n); ++k) codes[k] = (u8)(packed >> 8 * k);
  }
}

// Devices differ in which NaN a product is: here there is one.
DEVICE Quad decoded(u32 packed, float scale) {
  Quad quad;
  for (u32 k = 0; k < QUAD; ++k) {
    float value = CODE::value(packed >> CODE::BITS * k & ((1 << CODE::BITS) - 1)) * scale;
    quad.at[k] = is_nan(value) ? float_of(NOT_A_NUMBER) : value;
  }
  return quad;
}

template <bool WHOLE> DEVICE Quad decoded_at(const u8* data, u64 scales_at, u64 first, u64 n) {
  if (!WHOLE && first >= n) return Quad{};
  return decoded(codes_at<WHOLE>(data, first, n), ((const float*)(data + scales_at))[first / BLOCK]);
}

// -- a group of blocks ---------------------------------------------------------------------------------------------------

DEVICE u64 first_value() { return group() * STEPS * STEP + lane() * QUAD; } // of this lane

DEVICE bool is_whole(const Word* values, u64 n) { return is_aligned(values) && (group() + 1) * STEPS * STEP <= n; }

DEVICE float scale_of(u32 peak) {
  float scale = float_of(peak) / float_of(CODE::STEPS_BITS), least_normal = float_of(0x00800000);
  return peak >= INFINITE ? float_of(NOT_A_NUMBER) : scale < least_normal ? least_normal : scale;
}

DEVICE u32 peak_of(u32 peak, Quad quad) {
  for (u32 k = 0; k < QUAD; ++k) peak = greatest(peak, bits_of(quad.at[k]) & MAGNITUDE);
  return peak;
}

DEVICE u32 codes_of(Quad quad, float scale, float factor, u64 seed, u32 i) {
  u32 packed = 0;
  for (u32 k = 0; k < QUAD; ++k) packed |= CODE::code(quad.at[k] * factor, seed, i + k) << CODE::BITS * k;
  return is_nan(scale) ? CODE::ZEROS : packed;
}

// Source: quad(first) gives the values at `first`, 0 behind the end; peeked(first) does, too, and again(first) once more.
// done(first, codes, scale) hears what they became. HELD: steps whose values are asked for once.
template <bool WHOLE, class Source>
DEVICE void encode_blocks(const Source& source, u8* data, u64 n, u64 scales_at, u64 key, u64 index) {
  const int held_steps = !WHOLE ? 0 : STEPS < Source::HELD ? STEPS : Source::HELD;
  Quad held[Source::HELD];
  u64 start = first_value(), block = start / BLOCK;
  u32 peak = 0;
#pragma unroll
  for (int step = 0; step < held_steps; ++step) held[step] = source.quad(start + step * STEP);
#pragma unroll
  for (int step = 0; step < held_steps; ++step) peak = peak_of(peak, held[step]);
#pragma unroll 1
  for (u32 step = held_steps; step < STEPS; ++step) peak = peak_of(peak, source.peeked(start + step * STEP));
  for (u32 mask = LANES / 2; mask; mask /= 2) peak = greatest(peak, shuffle_xor(peak, mask));
  float scale = scale_of(peak), factor = 1.0f / scale;
  u64 seed = STOCHASTIC ? block_seed(key, index + block * BLOCK) : 0;
  if (start % BLOCK == 0 && start < n) ((float*)(data + scales_at))[block] = scale;
  auto put = [&](u64 first, Quad quad) {
    u32 packed = codes_of(quad, scale, factor, seed, (u32)(first % BLOCK));
    put_codes<WHOLE>(data, first, n, packed);
    source.done(first, packed, scale);
  };
#pragma unroll
  for (int step = 0; step < held_steps; ++step) put(start + step * STEP, held[step]);
#pragma unroll 1
  for (u32 step = held_steps; step < STEPS; ++step) put(start + step * STEP, source.again(start + step * STEP));
}

// Bytes of no code and no scale: up to 3 behind the codes, up to 12 at the end.
DEVICE void zero_gaps(u8* data, u64 n, u64 scales_at, u64 end) {
  u64 codes_end = code_bytes(n), scales_end = scales_at + 4 * ((n + BLOCK - 1) / BLOCK);
  if (codes_end + lane() < scales_at) data[codes_end + lane()] = 0;
  if (scales_end + lane() < end) data[scales_end + lane()] = 0;
}

template <bool WHOLE> struct Values {
  const Word* values;
  u64 n;
  static constexpr u32 HELD = MOST_HELD;
  METHOD Quad quad(u64 first) const { return quad_at<VALUE, WHOLE>(values, first, n); }
  METHOD Quad peeked(u64 first) const { return quad(first); }
  METHOD Quad again(u64 first) const { return quad(first); }
  METHOD void done(u64, u32, float) const {}
};

// Row r of `parts` begins with what rank r sent; my own addend is not encoded. A sum that is needed again takes its place.
template <bool WHOLE> struct Sum {
  const u8* parts;
  u64 row_bytes, ranks, own_rank, scales_at;
  Word* own;
  u64 n;
  METHOD Quad row(u64 rank, u64 first) const { return decoded_at<WHOLE>(parts + rank * row_bytes, scales_at, first, n); }
  static constexpr u32 HELD = MOST_SUMS;
  METHOD Quad quad(u64 first) const { return sum_of_ranks<VALUE, WHOLE>(*this, ranks, own_rank, own, first, n); }
  METHOD Quad peeked(u64 first) const {
    Quad sum = quad(first);
    put_quad<VALUE, WHOLE>(own, first, n, sum);
    return sum;
  }
  METHOD Quad again(u64 first) const { return quad_at<VALUE, WHOLE>(own, first, n); }
  METHOD void done(u64 first, u32 packed, float scale) const {
    put_quad<VALUE, WHOLE>(own, first, n, decoded(packed, scale));
  }
};

template <bool WHOLE, bool ADD> DEVICE void decode_blocks(const u8* data, Word* values, u64 n, u64 scales_at) {
  const int ahead = WHOLE ? MOST_HELD : 1;
#pragma unroll ahead
  for (u32 step = 0; step < STEPS; ++step) {
    u64 first = first_value() + step * STEP;
    Quad quad = decoded_at<WHOLE>(data, scales_at, first, n);
    if (ADD) add(quad, quad_at<VALUE, WHOLE>(values, first, n));
    put_quad<VALUE, WHOLE>(values, first, n, quad);
  }
}

// -- kernels -------------------------------------------------------------------------------------------------------------

KERNEL encode(const Word* values, u8* data, u64 n, u64 scales_at, u64 end, u64 key, u64 index, u64 groups) {
  if (group() >= groups) return;
  if (group() == 0) zero_gaps(data, n, scales_at, end);
  if (is_whole(values, n)) encode_blocks<true>(Values<true>{values, n}, data, n, scales_at, key, index);
  else encode_blocks<false>(Values<false>{values, n}, data, n, scales_at, key, index);
}

KERNEL sum_encode(const u8* parts, u64 row_bytes, u64 ranks, u64 own_rank, Word* own, u8* data, u64 n, u64 scales_at,
                  u64 end, u64 key, u64 index, u64 groups) {
  if (group() >= groups) return;
  if (group() == 0) zero_gaps(data, n, scales_at, end);
  Sum<true> whole{parts, row_bytes, ranks, own_rank, scales_at, own, n};
  Sum<false> ragged{parts, row_bytes, ranks, own_rank, scales_at, own, n};
  if (is_whole(own, n)) encode_blocks<true>(whole, data, n, scales_at, key, index);
  else encode_blocks<false>(ragged, data, n, scales_at, key, index);
}

KERNEL decode(const u8* data, Word* values, u64 n, u64 scales_at, u64 groups) {
  if (group() >= groups) return;
  if (is_whole(values, n)) decode_blocks<true, false>(data, values, n, scales_at);
  else decode_blocks<false, false>(data, values, n, scales_at);
}

KERNEL decode_add(const u8* data, Word* values, u64 n, u64 scales_at, u64 groups) {
  if (group() >= groups) return;
  if (is_whole(values, n)) decode_blocks<true, true>(data, values, n, scales_at);
  else decode_blocks<false, true>(data, values, n, scales_at);
}
