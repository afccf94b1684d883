// `exp`, bytes to values: after exponent.cu. Nothing in a record or a body is trusted.

DEVICE u32 size_of(u32 length, const u32* words) {
  Record record = record_at(words);
  bool coded = 1 <= record.mode && record.mode <= PLANES && record.last <= record.escapes && record.escapes <= length;
  return coded || record.mode == CONSTANT || record.mode == RAW ? padded(body_bytes(length, record)) : WRONG;
}

DEVICE u32 nibble_at(const u8* nibbles, u32 i) { return nibbles[i / 2] >> i % 2 * 4 & 15; }

// Whether there are as many escapes, and as many of them far, as the record says.
DEVICE bool agrees(Record record, Escapes mine, const u8* nibbles) {
  u32 far = 0;
  for (u32 i = lane(); i < (record.escapes + 1) / 2; i += GROUP)
    far += (nibbles[i] % 16 == FAR) + (nibbles[i] / 16 == FAR);
  return sum_of_lanes(mine.count) == record.escapes && sum_of_lanes(far) == record.last;
}

// The low byte of a value, and above it those that are as they were.
DEVICE u32 low_bytes(const u8* low, u32 length, u32 place) {
  u32 bytes = low[(sizeof(Word) - 2) * length + place];
  for (u32 i = 0; i + 2 < sizeof(Word); i++) bytes |= (u32)low[i * length + place] << 8 * (i + 1);
  return bytes;
}

// All values but the escapes.
template <class Out>
DEVICE void join(Nibbles codes, Nibbles extras, u32 length, Record record, const u8* low, Out to) {
  u32 width = (1 << record.mode) - 1, ahead[AHEAD];
  for (u32 row = 0; row < rows_of(length); row += AHEAD) {
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) ahead[i] = low_bytes(low, length, least((row + i) * GROUP + lane(), length - 1));
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) {
      u32 place = (row + i) * GROUP + lane(), near = codes.at[i] & 15;
      u32 high = (near + record.first & 255) << EXTRA | (extras.at[i] & ((1 << EXTRA) - 1));
      if (place < length && near != width) Out::put(to, place, word_of(high & 255, ahead[i] & 255, ahead[i] >> 8));
      codes.at[i] >>= 4, extras.at[i] >>= 4;
    }
  }
}

template <class Out> DEVICE void read_rows(const u32* planes, u32 length, Record record, const u8* low, Out to) {
  Nibbles codes = {}, extras = {};
#pragma unroll
  for (u32 p = 0; p < PLANES; p++)
    if (p < record.mode) codes.at[p] = transposed(planes[p]);
#pragma unroll
  for (u32 p = 0; p < EXTRA; p++) extras.at[p] = transposed(planes[PLANES + p]);
  codes.turn(), extras.turn();
  join(codes, extras, length, record, low, to);
}

// The escapes, each by the lane that has its row: no value is written twice.
template <class Out>
DEVICE void read_escapes(const u32* planes, u32 length, Record record, Escapes mine, const u8* low, Out to) {
  const u8 *nibbles = low + length * (sizeof(Word) - 1), *fars = nibbles + (record.escapes + 1) / 2;
  if (record.last > 0) {
    u32 far = 0;
    for (u32 i = 0; i < mine.count; i++) far += nibble_at(nibbles, mine.start + i) == FAR;
    fars += sum_up_to(far) - far;
  }
  u32 i = mine.start;
  for (u32 rest = mine.mask; rest; rest &= rest - 1, i++) {
    u32 name = nibble_at(nibbles, i), bit = first_one(rest), place = GROUP * lane() + bit;
    u32 high = (name == FAR ? *fars++ : near_of(name, record.first, (1 << record.mode) - 1)) << EXTRA;
#pragma unroll
    for (u32 p = PLANES; p < PLANES + EXTRA; p++) high |= (planes[p] >> bit & 1) << (p - PLANES);
    if (place >= length) break; // nothing that an encoder wrote
    u32 bytes = low_bytes(low, length, place);
    Out::put(to, place, word_of(high & 255, bytes & 255, bytes >> 8));
  }
}

// False if escapes and record disagree: then nothing is written.
template <class Out> DEVICE bool read_tile(const u32* words, const u32* body, u32 length, Out to) {
  Record record = record_at(words);
  if (record.mode == CONSTANT || record.mode == RAW) {
    for (u32 place = lane(); place < length; place += GROUP)
      Out::put(to, place, record.mode == RAW ? ((const Word*)body)[place] : (Word)record.last);
    return true;
  }
  u32 planes[PLANES + EXTRA], rows = rows_of(length);
#pragma unroll
  for (u32 p = 0; p < PLANES + EXTRA; p++) {
    bool there = lane() < rows && (p >= PLANES || p < record.mode);
    planes[p] = there ? body[(p < PLANES ? p : p - PLANES + record.mode) * rows + lane()] : 0;
  }
  const u8* low = (const u8*)(body + rows * (record.mode + EXTRA));
  Escapes mine = Escapes::of(planes, record.mode, rows);
  if (!agrees(record, mine, low + length * (sizeof(Word) - 1))) return false;
  if (length == TILE) read_rows(planes, TILE, record, low, to);
  else read_rows(planes, length, record, low, to);
  read_escapes(planes, length, record, mine, low, to);
  return true;
}
