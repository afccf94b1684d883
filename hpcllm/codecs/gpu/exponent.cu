// `exp`: codecs/exponent_encode.py draws its bytes and chooses windows; tiles.cuh has the kernels.
// A group walks over the values of its tile in rows of 32, one a lane, and keeps the nibbles of their codes. Four words of
// nibbles become four planes by exchanges of bits; a lane then has its value's bit of each row, and lanes are transposed:
//
//     row w    value 32 w   value 32 w + 1   ..   value 32 w + 31     --nibble w / 4 of a lane's word w % 4-->
//     lane l   bit w of plane p: row w's                              --transpose-->  word w of plane p, in lane w
//     lane w   escapes of row w, from its words of planes             --scan over lanes-->  where their nibbles go
//
// A ballot for each plane of each row would take four times the instructions, at a quarter of the rate.
//
// Lane beside lane meets memory, but for the few escapes. Neither atomics nor shared memory: the sample's histogram is
// counted by ballots, too, a bin a lane.
//
// Bytes moved for a bf16: 2 are read to measure, 2 read and 1.4 written to write; a copy moves 4. Bodies in slots that are
// moved together afterwards would take 2 + 1.4 + 1.4 + 1.4.

typedef VALUE::Word Word;

const u32 TILE = 1024, ROWS = TILE / GROUP;
const u32 RECORD_BYTES = 8, WRONG = 0xFFFFFFFF;
const u32 CONSTANT = 254, RAW = 255;
const u32 PLANES = 4, EXTRA = VALUE::HALF ? 3 : 0;
const u32 BELOW = 11, ABOVE = 3, ZERO = 14, FAR = 15;
const u32 SAMPLE = 256, SAMPLES = SAMPLE / GROUP; // of a tile, of a lane
const u32 AHEAD = 4;                              // rows that are on their way from memory at once, and words of nibbles

// The upper half of a value, rotated left by one: exponent (for fp16 and 3 bits more), low byte.
DEVICE u32 rotated(Word word) {
  u32 top = (u32)word >> (8 * sizeof(Word) - 16);
  return (top << 1 | top >> 15) & 0xFFFF;
}

DEVICE u32 exponent_of(Word word) { return ((u32)word >> (8 * sizeof(Word) - 9) & 255) >> EXTRA; }

DEVICE Word word_of(u32 high, u32 low, u32 rest) {
  u32 top = high << 7 | low >> 1 | (low & 1) << 15;
  return (Word)(top << (8 * sizeof(Word) - 16) | rest);
}

struct Record {
  u32 mode, first, escapes, last;
};

DEVICE Record record_at(const u32* words) { return {words[0] & 255, words[0] >> 8 & 255, words[0] >> 16, words[1]}; }

DEVICE u32 rows_of(u32 length) { return (length + GROUP - 1) / GROUP; }

// What a tile takes before it is padded.
DEVICE u32 body_bytes(u32 length, Record record) {
  if (record.mode == CONSTANT) return 0;
  if (record.mode == RAW) return length * sizeof(Word);
  u32 planes = 4 * rows_of(length) * (record.mode + EXTRA);
  return planes + length * (sizeof(Word) - 1) + (record.escapes + 1) / 2 + record.last;
}

DEVICE u32 padded(u32 bytes) { return (bytes + 3) & ~3u; }

// The nibble of an exponent that is not in the window. Zero has its own; of several names for 255 the last is written.
DEVICE u32 name_of(u32 exponent, u32 first, u32 width) {
  u32 below = first - 1 - exponent, above = exponent - first - width;
  if (exponent == 0) return ZERO;
  if (exponent < first) return below < BELOW ? below : FAR;
  if (above >= ABOVE) return FAR;
  return BELOW + (exponent == 255 ? ABOVE - 1 : above);
}

// The exponent of a nibble other than FAR.
DEVICE u32 near_of(u32 nibble, u32 first, u32 width) {
  if (nibble < BELOW) return first > nibble ? first - 1 - nibble : 0;
  return nibble < ZERO ? least(first + width + nibble - BELOW, 255u) : 0;
}

// Nibble r / 4 of word r % 4 is row r's <-> bit r of word p is bit p of row r's nibble.
struct Nibbles {
  u32 at[AHEAD];

  METHOD void turn() {
    exchange(at[0], at[1], 1, 0x55555555), exchange(at[2], at[3], 1, 0x55555555);
    exchange(at[0], at[2], 2, 0x33333333), exchange(at[1], at[3], 2, 0x33333333);
  }
};

DEVICE u32 sum_of_lanes(u32 x) { return shuffle(sum_up_to(x), GROUP - 1); }

// Where in its rows a tile's escapes are. All of it is lane w's for row w.
struct Escapes {
  u32 mask, count, start; // of row w: bits, how many, how many in the rows before

  DEVICE Escapes of(const u32* planes, u32 mode, u32 rows) {
    u32 mask = lane() < rows ? 0xFFFFFFFF : 0;
#pragma unroll
    for (u32 p = 0; p < PLANES; p++)
      if (p < mode) mask &= planes[p];
    u32 count = count_ones(mask);
    return {mask, count, sum_up_to(count) - count};
  }
};
