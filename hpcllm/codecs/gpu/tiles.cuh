// The kernels of codecs of variable rate, after the text of one of them. codecs/tiles.py draws the stream. Tiles are
// independent, but where a body lies depends on those before it, so that there are two passes and torch's sum between them:
//
//     measure   values           -> records, sizes     locate   records         -> sizes
//                      sizes  --cumulative sum-->  offsets
//     write     values, records  -> bodies, header     read     records, bodies -> values
//
// Every tile has a group. The text of the codec offers
//
//     TILE, RECORD_BYTES                             values of a tile; bytes of its record, a multiple of 4
//     measure_tile(values, length, record)           writes the record, returns the body's bytes, a multiple of 4
//     write_tile(values, length, record, body)
//     size_of(length, record)                        the body's bytes again; WRONG if no encoder wrote the record
//     read_tile(record, body, length, out)           false, and nothing written, if body and record disagree

const u32 HEADER_BYTES = 16;
const i64 LOST = (i64)1 << 40; // size of a body whose record is wrong: their sum cannot be right then

DEVICE u64 tiles_of(u64 n) { return (n + TILE - 1) / TILE; }

DEVICE u32 length_of(u64 n, u64 tile) { return (u32)least(n - tile * TILE, (u64)TILE); }

DEVICE u64 table_end(u64 n) { return HEADER_BYTES + tiles_of(n) * RECORD_BYTES; }

DEVICE u64 record_of(u64 tile) { return (HEADER_BYTES + tile * RECORD_BYTES) / 4; } // in words of the stream

KERNEL measure(const Word* __restrict__ values, u64 n, u32* __restrict__ stream, i64* sizes, u64 groups) {
  if (group() >= groups) return;
  u64 tile = group();
  if (tile == 0 && lane() == 0) sizes[0] = 0; // an empty array has a group, too
  if (tile >= tiles_of(n)) return;
  u32 size = measure_tile(values + tile * TILE, length_of(n, tile), stream + record_of(tile));
  if (lane() == 0) sizes[tile + 1] = size;
}

KERNEL write(const Word* __restrict__ values, u64 n, u32* __restrict__ stream, const i64* offsets, u64 groups) {
  if (group() >= groups) return;
  u64 tile = group(), end = table_end(n), used = end + offsets[tiles_of(n)];
  if (tile == 0 && lane() < 4) stream[lane()] = (u32)((lane() < 2 ? used : n) >> lane() % 2 * 32);
  if (tile >= tiles_of(n)) return;
  write_tile(values + tile * TILE, length_of(n, tile), stream + record_of(tile), stream + (end + offsets[tile]) / 4);
}

// A tile a lane. damaged: becomes a wrong tile + 1.
KERNEL locate(const u32* stream, u64 bytes, u64 n, i64* sizes, u64* damaged, u64 groups) {
  if (group() >= groups) return;
  u64 tile = group() * GROUP + lane();
  if (tile == 0) {
    u64 used = stream[0] | (u64)stream[1] << 32, values = stream[2] | (u64)stream[3] << 32;
    bool right = used == bytes && values == n;
    sizes[0] = right ? 0 : LOST;
    if (!right) *damaged = 1;
  }
  if (tile >= tiles_of(n)) return;
  u32 size = size_of(length_of(n, tile), stream + record_of(tile));
  sizes[tile + 1] = size == WRONG ? LOST : (i64)size;
  if (size == WRONG) *damaged = tile + 1;
}

// Where decoded values go.
struct Same {
  Word* out;
  DEVICE void put(Same to, u32 place, Word word) { to.out[place] = word; }
};
struct Floats {
  float* out;
  DEVICE void put(Floats to, u32 place, Word word) { to.out[place] = VALUE::widened(word); }
};
struct Sum {
  float* out;
  DEVICE void put(Sum to, u32 place, Word word) { to.out[place] += VALUE::widened(word); }
};

// Nothing is read or written unless all records are right, and the bodies as long as they say.
template <class Out> DEVICE void decode(const u32* stream, u64 bytes, u64 n, const i64* offsets, Out to, u64* damaged) {
  u64 tile = group(), end = table_end(n);
  bool right = offsets[tiles_of(n)] == (i64)(bytes - end);
  if (right) right = read_tile(stream + record_of(tile), stream + (end + offsets[tile]) / 4, length_of(n, tile), to);
  if (!right && lane() == 0 && !*damaged) *damaged = tile + 1; // a wrong record has been told already
}

KERNEL read(const u32* __restrict__ stream, u64 bytes, u64 n, const i64* offsets, Word* __restrict__ out, u64* damaged,
            u64 groups) {
  if (group() < groups) decode(stream, bytes, n, offsets, Same{out + group() * TILE}, damaged);
}

KERNEL read_floats(const u32* __restrict__ stream, u64 bytes, u64 n, const i64* offsets, float* __restrict__ out,
                   u64* damaged, u64 groups) {
  if (group() < groups) decode(stream, bytes, n, offsets, Floats{out + group() * TILE}, damaged);
}

KERNEL read_add(const u32* __restrict__ stream, u64 bytes, u64 n, const i64* offsets, float* __restrict__ out,
                u64* damaged, u64 groups) {
  if (group() < groups) decode(stream, bytes, n, offsets, Sum{out + group() * TILE}, damaged);
}
