// `mpc`: codecs/mpc.py draws its four stages, tiles.cuh has the kernels. A group walks over the 1024 words of its tile 32
// at a time, one a lane; differences and the transpose are shuffles.
//
// The stages are run twice, to measure and to write, rather than kept: 4 + 4 bytes read and about 3.7 written for an fp32,
// where bodies moved together afterwards would take 4 + 3.7 + 3.7 + 3.7. A copy moves 8.

typedef VALUE::Word Word;

const u32 WORDS = 1024; // of 32 bits, in a tile
const u32 TILE = WORDS * 4 / sizeof(Word);
const u32 RECORD_BYTES = 4;
const u32 WRONG = 0xFFFFFFFF;
const u32 AHEAD = 4; // rows that are on their way from memory at once

// Words of a tile of so many values, and rows of so many words.
DEVICE u32 words_of(u32 length) { return (length * (u32)sizeof(Word) + 3) / 4; }
DEVICE u32 rows_of(u32 length) { return (words_of(length) + GROUP - 1) / GROUP; }

DEVICE u32 below_lane() { return (1u << lane()) - 1; }

// A word of a tile: one value, or two; zeros past the end.
DEVICE u32 word_at(const Word* values, u32 length, u32 place) {
  if (sizeof(Word) == 4) return place < length ? values[place] : 0;
  u32 low = 2 * place < length ? values[2 * place] : 0;
  return low | (u32)(2 * place + 1 < length ? values[2 * place + 1] : 0) << 16;
}

// What the lane before has; the first lane has `last`, what lane 31 had in the row before.
DEVICE u32 before(u32 x, u32 last) {
  u32 up = shuffle_up(x, 1);
  return lane() > 0 ? up : last;
}

// The words of a row that its bitmap counts, if there is a body to write them to. Returns how many of the tile are not zero.
DEVICE u32 pack(const Word* values, u32 length, u32* body) {
  u32 last_word = 0, last_turned = 0, count = 0, bitmap = 0, rows = rows_of(length);
  for (u32 start = 0; start < rows; start += AHEAD) {
    u32 ahead[AHEAD];
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) ahead[i] = word_at(values, length, (start + i) * GROUP + lane());
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) {
      u32 row = start + i, place = row * GROUP + lane(), word = ahead[i], earlier = before(word, last_word);
      u32 turned = transposed(place < words_of(length) ? word - earlier : 0), rest = turned - before(turned, last_turned);
      u32 ones = votes(row < rows && rest != 0);
      if (body && ones >> lane() & 1) body[rows + count + count_ones(ones & below_lane())] = rest;
      last_word = shuffle(word, GROUP - 1);
      last_turned = shuffle(turned, GROUP - 1);
      bitmap = lane() == row ? ones : bitmap;
      count += count_ones(ones);
    }
  }
  if (body && lane() < rows) body[lane()] = bitmap;
  return count;
}

DEVICE u32 measure_tile(const Word* values, u32 length, u32* record) {
  u32 count = pack(values, length, 0);
  if (lane() == 0) *record = count;
  return 4 * (rows_of(length) + count);
}

DEVICE void write_tile(const Word* values, u32 length, const u32*, u32* body) { pack(values, length, body); }

DEVICE u32 size_of(u32 length, const u32* record) {
  u32 rows = rows_of(length);
  return *record <= GROUP * rows ? 4 * (rows + *record) : WRONG;
}

template <class Out> DEVICE void put_word(Out to, u32 length, u32 place, u32 word) {
  const u32 each = 4 / sizeof(Word);
  for (u32 i = 0; i < each; i++)
    if (each * place + i < length) Out::put(to, each * place + i, (Word)(word >> 16 * i));
}

// False if bitmap and record disagree: then nothing is written.
template <class Out> DEVICE bool read_tile(const u32* record, const u32* body, u32 length, Out to) {
  u32 rows = rows_of(length), bitmap = lane() < rows ? body[lane()] : 0, sum = sum_up_to(count_ones(bitmap));
  if (shuffle(sum, GROUP - 1) != *record) return false;
  u32 start = rows + sum - count_ones(bitmap), last_turned = 0, last_word = 0;
  for (u32 first = 0; first < rows; first += AHEAD) { // rows past the last have no bits
    u32 ahead[AHEAD];
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) {
      u32 ones = shuffle(bitmap, first + i), at = shuffle(start, first + i) + count_ones(ones & below_lane());
      ahead[i] = ones >> lane() & 1 ? body[at] : 0;
    }
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) {
      u32 turned = last_turned + sum_up_to(ahead[i]), word = last_word + sum_up_to(transposed(turned));
      last_turned = shuffle(turned, GROUP - 1);
      last_word = shuffle(word, GROUP - 1);
      put_word(to, length, (first + i) * GROUP + lane(), word);
    }
  }
  return true;
}
