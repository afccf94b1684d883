// `exp`, values to bytes: after exponent.cu. codecs/exponent_encode.py says how a window is chosen.

// -- the window --------------------------------------------------------------------------------------------------------

// How many of the samples are 32 * row + lane: those of which each bit is that of the lane's own number.
DEVICE u32 count(const u32* samples, u32 row) {
  u32 total = 0;
#pragma unroll
  for (u32 i = 0; i < SAMPLES; i++) {
    u32 mine = votes(samples[i] / GROUP == row);
#pragma unroll
    for (u32 bit = 0; bit < 5; bit++) {
      u32 ones = votes(samples[i] >> bit & 1);
      mine &= lane() >> bit & 1 ? ones : ~ones;
    }
    total += count_ones(mine);
  }
  return total;
}

// Counts of smaller samples for 96 exponents: 32 at `here`, one a lane, and their neighbours.
struct Below {
  u32 left, here, right;

  DEVICE u32 at(Below b, u32 up) {
    u32 x = shuffle(b.here, lane() + up & 31), y = shuffle(b.right, lane() + up & 31);
    return lane() + up < GROUP ? x : y;
  }
  DEVICE u32 down(Below b, u32 by) {
    u32 x = shuffle(b.here, lane() - by & 31), y = shuffle(b.left, lane() - by & 31);
    return lane() >= by ? x : y;
  }
};

// The least size in half bytes << 11 | planes << 8 | first exponent, of the windows that begin with this lane's exponent.
DEVICE u32 best_window(Below below, u32 exponent, u32 zeros) {
  u32 under = Below::down(below, BELOW), best = 0xFFFFFFFF;
  u32 near = exponent > BELOW ? under - zeros : 0;
#pragma unroll
  for (u32 planes = 1; planes <= PLANES; planes++) {
    u32 width = (1 << planes) - 1;
    u32 saved = Below::at(below, width) - below.here + 2 * (Below::at(below, width + ABOVE) - near);
    best = least(best, (planes * SAMPLE / 4 + 3 * SAMPLE - saved) << 11 | planes << 8 | exponent);
  }
  return best;
}

DEVICE u32 least_of_lanes(u32 x) {
  for (u32 mask = GROUP / 2; mask > 0; mask /= 2) x = least(x, shuffle_xor(x, mask));
  return x;
}

// exponents: four rows in a word. Those of places 0 to 3 of each 16 are the sample. Returns planes << 8 | first exponent.
DEVICE u32 choose(const u32* exponents, u32 low, u32 high) {
  u32 from = (lane() & 3) | (lane() & 4) << 2, samples[SAMPLES];
#pragma unroll
  for (u32 i = 0; i < SAMPLES; i++) samples[i] = (shuffle(exponents[i], from) >> lane() / 8 * 8 & 255) - low;
  u32 counted = 0, best = 0xFFFFFFFF, zeros = 0;
  Below below = {0, 0, 0};
  for (u32 row = 0; row <= (high - low) / GROUP + 1; row++) { // the row to the right of that whose windows are tried
    u32 mine = row <= (high - low) / GROUP ? count(samples, row) : 0, sum = sum_up_to(mine);
    below = {below.here, below.right, counted + sum - mine};
    counted += shuffle(sum, GROUP - 1);
    if (row == 0) continue;
    if (row == 1 && low == 0) zeros = shuffle(below.here, 1);
    u32 exponent = low + GROUP * (row - 1) + lane(), found = best_window(below, exponent, zeros);
    best = least(best, exponent <= high ? found : 0xFFFFFFFF);
  }
  return least_of_lanes(best) & 0x7FF;
}

// -- writing -----------------------------------------------------------------------------------------------------------

// Four bytes in a word: the sum of each and `y`, modulo 256; the high bit of those above `most`, which is below 128.
const u32 HIGH = 0x80808080, ONES = 0x01010101;

DEVICE u32 plus(u32 x, u32 y) { return ((x & ~HIGH) + (ONES * y & ~HIGH)) ^ ((x ^ ONES * y) & HIGH); }

DEVICE u32 above(u32 x, u32 most) { return (((x & ~HIGH) + ONES * (127 - most)) | x) & HIGH; }

// The high bits of the four rows from `row` that have a value in this lane.
DEVICE u32 inside(u32 row, u32 length) {
  u32 mask = 0;
#pragma unroll
  for (u32 j = 0; j < 4; j++) mask |= (row + j) * GROUP + lane() < length ? 0x80u << 8 * j : 0;
  return mask;
}

// Escapes, and far bytes << 16, of the whole tile. Named are 0 and what is from `least_named` to `most_named`.
DEVICE u32 count_escapes(const u32* exponents, u32 length, u32 first, u32 width) {
  u32 counts = 0, least_named = first > BELOW ? first - BELOW : 0, most_named = least(first + width + ABOVE - 1, 255u);
#pragma unroll
  for (u32 i = 0; i < ROWS / 4; i++) {
    u32 x = exponents[i], escapes = above(plus(x, 256 - first & 255), width - 1);
    if (length < TILE) escapes &= inside(4 * i, length);
    u32 far = escapes & above(plus(x, 256 - least_named & 255), most_named - least_named) & above(x, 0);
    counts += count_ones(far) << 16 | count_ones(escapes);
  }
  return sum_of_lanes(counts);
}

// What a lane has seen: least and greatest exponent, bits that differ from those of the tile's first value.
struct Seen { u32 low, high; Word differences; };

// Four rows of exponents to a word; places past the end count as the first value.
DEVICE Seen load(const Word* values, u32 length, u32* exponents) {
  Seen seen = {255, 0, 0};
  Word first = values[0];
#pragma unroll
  for (u32 i = 0; i < ROWS / 4; i++) {
    exponents[i] = 0;
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
      u32 place = (4 * i + j) * GROUP + lane();
      Word value = values[place < length ? place : 0];
      u32 exponent = exponent_of(value);
      seen = {least(seen.low, exponent), greatest(seen.high, exponent), (Word)(seen.differences | (value ^ first))};
      exponents[i] |= exponent << 8 * j;
    }
  }
  return seen;
}

DEVICE Record measured(const Word* values, u32 length) {
  u32 exponents[ROWS / 4];
  Seen seen = length == TILE ? load(values, TILE, exponents) : load(values, length, exponents); // a known length is faster
  if (!any_lane(seen.differences != 0)) return {CONSTANT, 0, 0, values[0]};
  u32 window = choose(exponents, least_of_lanes(seen.low), 255 - least_of_lanes(255 - seen.high));
  u32 planes = window >> 8, first = window & 255, counts = count_escapes(exponents, length, first, (1 << planes) - 1);
  Record record = {planes, first, counts & 0xFFFF, counts >> 16};
  return body_bytes(length, record) < length * sizeof(Word) ? record : Record{RAW, 0, 0, 0};
}

DEVICE u32 measure_tile(const Word* values, u32 length, u32* words) {
  Record record = measured(values, length);
  if (lane() < 2) words[lane()] = lane() ? record.last : record.mode | record.first << 8 | record.escapes << 16;
  return padded(body_bytes(length, record));
}

DEVICE void write_low_bytes(Word value, u32 place, u32 length, u8* low) {
  for (u32 i = 0; i + 2 < sizeof(Word); i++) low[i * length + place] = (u8)(value >> 8 * i);
  low[(sizeof(Word) - 2) * length + place] = (u8)rotated(value);
}

// Values to codes, low bytes to memory. Past the end codes are 0, and extra bits those of the first value.
DEVICE void split(const Word* values, u32 length, Record record, Nibbles& codes, Nibbles& extras, u8* low) {
  u32 width = (1 << record.mode) - 1;
  for (u32 row = 0; row < ROWS; row += AHEAD) {
    Word ahead[AHEAD];
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) {
      u32 place = (row + i) * GROUP + lane();
      ahead[i] = values[place < length ? place : 0];
    }
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) {
      u32 place = (row + i) * GROUP + lane(), code = least(exponent_of(ahead[i]) - record.first & 255, width);
      codes.at[i] = codes.at[i] >> 4 | (place < length ? code : 0) << 28;
      extras.at[i] = extras.at[i] >> 4 | rotated(ahead[i]) >> 8 << 28;
      if (place < length) write_low_bytes(ahead[i], place, length, low);
    }
  }
}

DEVICE void write_rows(const Word* values, u32 length, Record record, u32* planes, u8* low) {
  Nibbles codes = {}, extras = {};
  split(values, length, record, codes, extras, low);
  codes.turn(), extras.turn();
#pragma unroll
  for (u32 p = 0; p < PLANES; p++)
    if (p < record.mode) planes[p] = transposed(codes.at[p]);
#pragma unroll
  for (u32 p = 0; p < EXTRA; p++) planes[PLANES + p] = transposed(extras.at[p]);
}

// Nibbles two to a byte: the lane of its first half writes it. The second may be the first of the next lane that has one.
DEVICE void write_nibbles(u64 names, u64 more, Escapes mine, u8* out) {
  u32 later = votes(mine.count > 0) & ~((2u << lane()) - 1);
  u32 following = shuffle((u32)names & 15, first_one(later) & 31);
  for (u32 i = mine.start & 1; i < mine.count; i += 2) {
    u64 rest = i < 16 ? names >> 4 * i : more >> 4 * (i - 16);
    u32 second = i == 15 ? (u32)more & 15 : (u32)(rest >> 4) & 15;
    if (i + 1 == mine.count) second = later ? following : 0;
    out[(mine.start + i) / 2] = (u8)((rest & 15) | second << 4);
  }
}

DEVICE void write_escapes(const Word* values, Record record, Escapes mine, u8* nibbles) {
  u64 names = 0, more = 0;
  u32 far = 0, width = (1 << record.mode) - 1, i = 0;
  const Word* row = values + GROUP * lane();
  for (u32 rest = mine.mask; rest; rest &= rest - 1, i++) { // read again, but just read: they are near
    u32 name = name_of(exponent_of(row[first_one(rest)]), record.first, width);
    if (i < 16) names |= (u64)name << 4 * i;
    else more |= (u64)name << 4 * (i - 16);
    far |= name == FAR ? rest & ~(rest - 1) : 0;
  }
  write_nibbles(names, more, mine, nibbles);
  u8* fars = nibbles + (record.escapes + 1) / 2 + (sum_up_to(count_ones(far)) - count_ones(far));
  for (; far; far &= far - 1) *fars++ = (u8)exponent_of(row[first_one(far)]);
}

DEVICE void write_tile(const Word* values, u32 length, const u32* words, u32* body) {
  Record record = record_at(words);
  if (record.mode == CONSTANT) return;
  u32 planes[PLANES + EXTRA] = {}, rows = rows_of(length), end = body_bytes(length, record), count = record.mode + EXTRA;
  u8* low = (u8*)(body + rows * count);
  if (lane() < padded(end) - end) ((u8*)body)[end + lane()] = 0;
  if (record.mode == RAW) {
    for (u32 place = lane(); place < length; place += GROUP) ((Word*)body)[place] = values[place];
    return;
  }
  if (length == TILE) write_rows(values, TILE, record, planes, low);
  else write_rows(values, length, record, planes, low);
#pragma unroll
  for (u32 p = 0; p < PLANES + EXTRA; p++)
    if (lane() < rows && (p >= PLANES || p < record.mode))
      body[(p < PLANES ? p : p - PLANES + record.mode) * rows + lane()] = planes[p];
  write_escapes(values, record, Escapes::of(planes, record.mode, rows), low + length * (sizeof(Word) - 1));
}
