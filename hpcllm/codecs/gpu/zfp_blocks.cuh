// `zfp`, blocks between memory and registers: after zfp.cu.

const u32 NOT_FINITE = 1;           // more to come, but exponent field 0: no zfp encoder writes it
const u32 LEAST = (127 - 98) << 23; // 2^-98: below it zfp's own scale factor overflows

struct Floats { float at[4]; };

// -- blocks --------------------------------------------------------------------------------------------------------------

DEVICE u32 magnitude(float x) { return bits_of(x) & MAGNITUDE; }

DEVICE Code block_of(Floats x) {
  u32 peak = 0;
#pragma unroll
  for (u32 i = 0; i < 4; i++) peak = greatest(peak, magnitude(x.at[i]));
  if (peak < LEAST) return 0;
  if (peak >= INFINITE) return NOT_FINITE;
  float scale = float_of((283 - (peak >> 23)) << 23); // 2^30 over the power of two above the peak
  Coefficients c;
#pragma unroll
  for (u32 i = 0; i < 4; i++) c.at[i] = (u32)(i32)(x.at[i] * scale); // towards zero
  c = lift(c);
#pragma unroll
  for (u32 i = 0; i < 4; i++) c.at[i] = (c.at[i] + NEGABINARY) ^ NEGABINARY;
  return encoded(c) << HEADER_BITS | (Code)(2 * (peak >> 23) + 3);
}

// 2^(exponent - 30), below the normal numbers too.
DEVICE float scale_of(u32 field) {
  return float_of(field > 30 ? (field - 30) << 23 : field >= 8 ? 1u << (field - 8) : 0);
}

DEVICE Floats floats_of(Code block) {
  u32 header = (u32)block & 511;
  float nan = float_of(NOT_A_NUMBER), scale = scale_of(header >> 1);
  if (header == NOT_FINITE) return {{nan, nan, nan, nan}};
  if (header % 2 == 0) return {{0, 0, 0, 0}};
  Coefficients c = decoded(block >> HEADER_BITS);
#pragma unroll
  for (u32 i = 0; i < 4; i++) c.at[i] = (c.at[i] ^ NEGABINARY) - NEGABINARY;
  c = unlift(c);
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

DEVICE u32 of_lane(u32 x, u32 from) { return shuffle(x, from); }
DEVICE u64 of_lane(u64 x, u32 from) {
  u32 low = shuffle((u32)x, from), high = shuffle((u32)(x >> 32), from);
  return low | (u64)high << 32;
}
DEVICE Wide of_lane(Wide x, u32 from) {
  u64 low = of_lane(x.low, from);
  return {low, of_lane(x.high, from)};
}

// Word `place` of the group: bits of one block, or of the few that meet there.
DEVICE u32 word_of(Code mine, u32 place) {
  if (BITS == 32) return (u32)mine;
  const u32 blocks = BITS % 32 ? 31 / BITS + 2 : 1; // at most
  u32 word = 0;
#pragma unroll
  for (u32 i = 0; i < blocks; i++) {
    u32 block = 32 * place / BITS + i, begin = block * BITS, end = 32 * place;
    Code other = of_lane(mine, block & 31);
    if (i == 0) word = (u32)(other >> (end - begin));
    else if (begin - end < 32) word |= (u32)other << (begin - end);
  }
  return word;
}

// words: of the whole encoding.
KERNEL encode(const Word* __restrict__ values, u64 n, u32* __restrict__ out, u64 words, u64 groups) {
  if (group() >= groups) return;
  u64 first = 4 * (group() * GROUP + lane());
  Code mine = 0;
  if (first < n) mine = block_of(load(values + first, (u32)least(n - first, (u64)4)));
#pragma unroll
  for (u32 row = 0; row < WORDS; row += GROUP) {
    u32 place = row + lane(), word = word_of(mine, place % WORDS);
    if (place < WORDS && group() * WORDS + place < words) out[group() * WORDS + place] = word;
  }
}

// The block at bit BITS * block: it lies in so many words, the last of which may be beyond the end.
DEVICE Floats block_at(const u32* data, u64 words, u64 block) {
  const u32 most = BITS % 32 ? (BITS + 31 + 28) / 32 : BITS / 32;
  u64 start = block * BITS / 32;
  u32 shift = (u32)(block * BITS % 32), word[most];
#pragma unroll
  for (u32 i = 0; i < most; i++) word[i] = start + i < words ? data[start + i] : 0;
  Code code = word[0];
#pragma unroll
  for (u32 i = 1; i < most && 32 * i < CODE_BITS; i++) code = code | (Code)word[i] << 32 * i;
  code = code >> shift;
  if (32 * most > CODE_BITS && shift) code = code | (Code)word[most - 1] << (CODE_BITS - shift);
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
