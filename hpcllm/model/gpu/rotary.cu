// Queries and keys rotated together: each head of each token by the angles of its position (arXiv:2104.09864). A token a group.
//
//     (a, b) -> (a cos - b sin, b cos + a sin)      a pair: channels i and i + ROTATED/2; the signs are in the table
//     backward: by the opposite angle; channels from ROTATED on are copied
//
// Macros: VALUE (common.cuh); CHANNELS of a head, and ROTATED of them, both even.

typedef VALUE::Word Word;
const u32 HALF = ROTATED / 2;

struct Angles { const float *cosines, *sines; float sign; };

// `WIDTH` pairs of channels from `at` on, of one head. The table has both halves of a row: cosines are equal in them.
template <u32 WIDTH> DEVICE void rotate(const Word* head, Word* out, Angles angles, u32 at) {
  Four<Word> low, high;
  if (WIDTH == QUAD) {
    low = four_at(head + at);
    high = four_at(head + at + HALF);
  } else {
    low.at[0] = head[at];
    high.at[0] = head[at + HALF];
  }
  for (u32 k = 0; k < WIDTH; ++k) {
    float a = VALUE::widened(low.at[k]), b = VALUE::widened(high.at[k]);
    float cosine = angles.cosines[at + k];
    low.at[k] = VALUE::narrowed(a * cosine + b * (angles.sign * angles.sines[at + k]));
    high.at[k] = VALUE::narrowed(b * cosine + a * (angles.sign * angles.sines[at + k + HALF]));
  }
  if (WIDTH == QUAD) {
    put_four(out + at, low);
    put_four(out + at + HALF, high);
  } else {
    out[at] = low.at[0];
    out[at + HALF] = high.at[0];
  }
}

template <u32 WIDTH> DEVICE void rotate_heads(const Word* heads, Word* out, u64 count, Angles angles) {
  const u32 items = HALF / WIDTH;
#pragma unroll 4
  for (u64 item = lane(); item < count * items; item += GROUP) {
    u64 head = item / items * CHANNELS;
    rotate<WIDTH>(heads + head, out + head, angles, (u32)(item % items) * WIDTH);
  }
  const u32 others = CHANNELS - ROTATED;
  for (u64 item = lane(); item < count * others; item += GROUP) {
    u64 place = item / (others ? others : 1) * CHANNELS + ROTATED + item % (others ? others : 1);
    out[place] = heads[place];
  }
}

DEVICE void rotate_token(const Word* heads, Word* out, u64 count, Angles angles) {
  bool aligned = is_aligned(heads) && is_aligned(out) && CHANNELS % QUAD == 0 && HALF % QUAD == 0;
  if (aligned) rotate_heads<HALF % QUAD ? 1 : QUAD>(heads, out, count, angles);
  else rotate_heads<1>(heads, out, count, angles);
}

// q, q_out: (groups, q_heads, CHANNELS); k, k_out: (groups, k_heads, CHANNELS); cosines, sines: (angles, ROTATED) fp32.
// positions: (groups,), the angles of each token, where documents begin anew in a row; 0: each row takes the first `sequence`.
KERNEL rotary(const Word* q, const Word* k, const float* cosines, const float* sines, const i64* positions, Word* q_out, Word* k_out, u64 sequence, u64 q_heads, u64 k_heads, u64 is_backward, u64 groups) {
  if (group() >= groups) return;
  u64 position = positions ? (u64)positions[group()] : group() % sequence;
  u64 row = position * ROTATED, q_row = group() * q_heads * CHANNELS, k_row = group() * k_heads * CHANNELS;
  Angles angles{cosines + row, sines + row, is_backward ? -1.0f : 1.0f};
  rotate_token(q + q_row, q_out + q_row, q_heads, angles);
  rotate_token(k + k_row, k_out + k_row, k_heads, angles);
}
