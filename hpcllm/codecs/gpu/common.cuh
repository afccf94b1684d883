// What every kernel's text begins with: numbers as bits, and groups of 32 lanes. Taken by NVRTC, hipRTC and, in the tests,
// as either of them by a C++ compiler with tests/emulated/emulator.h before it. Nothing is included.
//
//     launch    group 0           group 1           ..    one group for each piece of the array
//     group     lane 0 1 .. 31    lane 0 1 .. 31          lanes exchange values with lanes of their group, and only with them
//
// A group is a warp of NVIDIA's, or half a wavefront of 64 of AMD's. All lanes of a group come to each exchange together:
// no return and no branch around one that only some of them take. Every parameter of a kernel is a pointer or 64 bits.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int i32;
typedef long long i64;

const u32 GROUP = 32;
const u32 THREADS = 128; // of a block of the launch: launch.py says it too

// -- groups --------------------------------------------------------------------------------------------------------------

#define METHOD __device__ __forceinline__
#define DEVICE static METHOD
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS)

#if defined(__HIP_DEVICE_COMPILE__) || defined(__HIPCC_RTC__)
DEVICE u32 shuffle(u32 x, u32 from) { return (u32)__shfl((int)x, (int)from, 32); }
DEVICE u32 shuffle_xor(u32 x, u32 mask) { return (u32)__shfl_xor((int)x, (int)mask, 32); }
DEVICE u32 shuffle_up(u32 x, u32 delta) { return (u32)__shfl_up((int)x, delta, 32); }
DEVICE u32 shuffle_down(u32 x, u32 delta) { return (u32)__shfl_down((int)x, delta, 32); }
DEVICE u32 votes(bool x) { // of the half that this lane is in: a choice between two registers, which costs less than a shift
  u64 of_wave = __ballot(x);
  return warpSize == 64 && threadIdx.x & 32 ? (u32)(of_wave >> 32) : (u32)of_wave;
}
#else
DEVICE u32 shuffle(u32 x, u32 from) { return __shfl_sync(0xFFFFFFFF, x, from); }
DEVICE u32 shuffle_xor(u32 x, u32 mask) { return __shfl_xor_sync(0xFFFFFFFF, x, mask); }
DEVICE u32 shuffle_up(u32 x, u32 delta) { return __shfl_up_sync(0xFFFFFFFF, x, delta); }
DEVICE u32 shuffle_down(u32 x, u32 delta) { return __shfl_down_sync(0xFFFFFFFF, x, delta); }
DEVICE u32 votes(bool x) { return __ballot_sync(0xFFFFFFFF, x); }
#endif

DEVICE u32 lane() { return threadIdx.x & (GROUP - 1); }
DEVICE u64 group() { return ((u64)blockIdx.x * THREADS + threadIdx.x) / GROUP; }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }
DEVICE u32 bits_of(float x) { return __float_as_uint(x); }
DEVICE u32 count_ones(u32 x) { return (u32)__popc(x); }
DEVICE u32 leading_zeros(u32 x) { return (u32)__clz((int)x); } // 32 for 0
DEVICE u32 first_one(u32 x) { return x ? (u32)__ffs((int)x) - 1 : 32; }
DEVICE float floor_of(float x) { return floorf(x); }
DEVICE float exp_of(float x) { return expf(x); } // this and the next: to 2 units in the last place, not the CPU's bits
DEVICE float log_of(float x) { return logf(x); }
DEVICE float root_of(float x) { return sqrtf(x); }
DEVICE float fused(float x, float y, float z) { return fmaf(x, y, z); } // x y + z, rounded once
DEVICE u32 reversed(u32 x) { return __brev(x); } // bit 0 <-> bit 31

DEVICE bool any_lane(bool x) { return votes(x) != 0; }
DEVICE u32 least(u32 x, u32 y) { return x < y ? x : y; }
DEVICE u64 least(u64 x, u64 y) { return x < y ? x : y; }
DEVICE u32 greatest(u32 x, u32 y) { return x < y ? y : x; }

// The sum of x over the lanes up to and with this one.
DEVICE u32 sum_up_to(u32 x) {
  for (u32 delta = 1; delta < GROUP; delta *= 2) {
    u32 before = shuffle_up(x, delta);
    x += lane() >= delta ? before : 0;
  }
  return x;
}

// Bit j of lane i <-> bit i of lane j: blocks of 16 bits first, then of 8, to 1.
DEVICE u32 transposed(u32 x) {
  u32 mask = 0x0000FFFF;
#pragma unroll
  for (u32 distance = 16; distance > 0; distance /= 2) {
    u32 other = shuffle_xor(x, distance);
    x = lane() & distance ? (x & ~mask) | (other >> distance & mask) : (x & mask) | (other & mask) << distance;
    mask ^= mask << distance / 2;
  }
  return x;
}

// Exchanges the bits of y in the mask with those of x that are `by` above.
DEVICE void exchange(u32& x, u32& y, u32 by, u32 mask) {
  u32 differences = (x >> by ^ y) & mask;
  y ^= differences, x ^= differences << by;
}

// -- numbers -------------------------------------------------------------------------------------------------------------

const u32 MAGNITUDE = 0x7FFFFFFF, INFINITE = 0x7F800000, QUIET = 0x00400000, NOT_A_NUMBER = 0x7FC00000;

DEVICE bool is_nan(float x) { return (bits_of(x) & MAGNITUDE) > INFINITE; }

DEVICE float float_of_bf16(u16 bits) { return float_of((u32)bits << 16); }

// To nearest, ties to even. A NaN keeps its sign and the first of its bits.
DEVICE u16 bf16_of(float x) {
  u32 bits = bits_of(x), high = bits >> 16;
  return (u16)(is_nan(x) ? high | 0x40 : (bits + 0x7FFF + (high & 1)) >> 16);
}

DEVICE float float_of_fp16(u16 bits) {
  u32 sign = (u32)(bits & 0x8000) << 16, size = bits & 0x7FFF;
  u32 number = size < 0x400 ? bits_of((float)(i32)size * float_of(0x33800000)) : (size << 13) + 0x38000000; // 2^-24, 112 << 23
  u32 none = INFINITE | (size << 13 & 0x7FE000) | (size > 0x7C00 ? QUIET : 0);
  return float_of(sign | (size < 0x7C00 ? number : none));
}

// To nearest, ties to even: 65520 and above is infinite. A NaN keeps its sign and the first of its bits.
DEVICE u16 fp16_of(float x) {
  u32 bits = bits_of(x), sign = bits >> 16 & 0x8000, size = bits & MAGNITUDE;
  u32 normal = (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13;
  u32 tiny = bits_of(float_of(size) + 0.5f) - 0x3F000000; // at 1/2 fp32 has steps of 2^-24, as fp16 below 2^-14
  u32 number = size < 0x38800000 ? tiny : size < 0x477FF000 ? normal : 0x7C00;
  return (u16)(sign | (size > INFINITE ? 0x7E00 | (size >> 13 & 0x3FF) : number));
}

// VALUE, which the launch defines, is one of these.
struct Fp32 {
  typedef u32 Word;
  static const bool HALF = false;
  DEVICE float widened(Word bits) { return float_of(bits); }
  DEVICE Word narrowed(float x) { return bits_of(x); }
};
struct Bf16 {
  typedef u16 Word;
  static const bool HALF = false;
  DEVICE float widened(Word bits) { return float_of_bf16(bits); }
  DEVICE Word narrowed(float x) { return bf16_of(x); }
};
struct Fp16 {
  typedef u16 Word;
  static const bool HALF = true;
  DEVICE float widened(Word bits) { return float_of_fp16(bits); }
  DEVICE Word narrowed(float x) { return fp16_of(x); }
};

// -- memory --------------------------------------------------------------------------------------------------------------

// Four words that are read or written at once where they lie at a multiple of their size.
template <class Word> struct alignas(4 * sizeof(Word)) Four { Word at[4]; };

template <class Word> DEVICE bool is_aligned(const Word* words) { return ((u64)words & (sizeof(Four<Word>) - 1)) == 0; }

template <class Word> DEVICE Four<Word> four_at(const Word* words) { return *(const Four<Word>*)words; }
template <class Word> DEVICE void put_four(Word* words, Four<Word> four) { *(Four<Word>*)words = four; }

// -- quads: four values, which a lane takes at once ----------------------------------------------------------------------

const u32 QUAD = 4;
const u32 STEP = GROUP * QUAD; // values that a group takes at once: a lane one quad, the next lane the next one

struct Quad { float at[QUAD]; };

// Values first .. first + 3 of n. WHOLE: all of them are there, and is_aligned says yes; else 0 behind the end.
template <class Kind, bool WHOLE> DEVICE Quad quad_at(const typename Kind::Word* values, u64 first, u64 n) {
  Quad quad;
  if (WHOLE) {
    Four<typename Kind::Word> words = four_at(values + first);
    for (u32 k = 0; k < QUAD; ++k) quad.at[k] = Kind::widened(words.at[k]);
  } else {
    for (u32 k = 0; k < QUAD; ++k) quad.at[k] = first + k < n ? Kind::widened(values[first + k]) : 0;
  }
  return quad;
}

template <class Kind, bool WHOLE> DEVICE void put_quad(typename Kind::Word* values, u64 first, u64 n, Quad quad) {
  Four<typename Kind::Word> words;
  for (u32 k = 0; k < QUAD; ++k) words.at[k] = Kind::narrowed(quad.at[k]);
  if (WHOLE) {
    put_four(values + first, words);
  } else {
    for (u32 k = 0; k < QUAD; ++k)
      if (first + k < n) values[first + k] = words.at[k];
  }
}

DEVICE void add(Quad& total, Quad more) {
  for (u32 k = 0; k < QUAD; ++k) total.at[k] += more.at[k];
}

template <bool WHOLE, class Rows> DEVICE void add_rows(Quad& total, const Rows& rows, u64 rank, u64 end, u64 first) {
  const int ahead = WHOLE ? 4 : 1;
#pragma unroll ahead
  for (; rank < end; ++rank) add(total, rows.row(rank, first));
}

// The sum over all ranks, in their order, of the quad at `first`, rounded to Kind: row(rank, first) is what a rank sent.
template <class Kind, bool WHOLE, class Rows>
DEVICE Quad sum_of_ranks(const Rows& rows, u64 ranks, u64 own_rank, const typename Kind::Word* own, u64 first, u64 n) {
  Quad mine = quad_at<Kind, WHOLE>(own, first, n), total = own_rank ? rows.row(0, first) : mine;
  add_rows<WHOLE>(total, rows, 1, own_rank, first);
  if (own_rank) add(total, mine);
  add_rows<WHOLE>(total, rows, own_rank + 1, ranks, first);
  for (u32 k = 0; k < QUAD; ++k)
    total.at[k] = WHOLE || first + k < n ? Kind::widened(Kind::narrowed(total.at[k])) : 0; // a row may decode to others
  return total;
}
