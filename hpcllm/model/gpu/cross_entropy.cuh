// Cross entropy over one rank's part of the vocabulary: a row of logits, those of one token, a group.
//
//     statistics   row --greatest, and sum of exp(x - greatest), in one pass--> log of the sum of exp; logit of the target
//     gradient     row <-- weight (exp(x - normaliser) - [x is the target's]), in place; weight 0 for a target that is not
//
// A lane keeps both for what it has seen, and scales its sum when greater values come: an exponential a value, and one more
// for every 16. A row may begin anywhere: quads lie at multiples of their size, so the first may begin before the row.

const float LOWEST = -3.402823466e38f, NOTHING = -1.0f / 0.0f; // the least number; what adds nothing to a sum of exp
const i64 IGNORED = -100; // loss.py says it too

struct Row {
  Word* words; // of the quad in which the row begins
  u64 begin, end; // of the row, in values from there
  METHOD Row(Word* logits, u64 row, u64 size) {
    Word* first = logits + row * size;
    begin = (u64)first / sizeof(Word) % QUAD;
    words = first - begin;
    end = begin + size;
  }
  METHOD bool has(u64 at) const { return begin <= at && at < end; }
  METHOD bool has_span(u64 at) const { return begin <= at && at + SPAN <= end; }

  template <bool WHOLE> METHOD Quad quad(u64 at) const {
    if (WHOLE) return quad_at<VALUE, true>(words, at, end);
    Quad found;
    for (u32 k = 0; k < QUAD; ++k) found.at[k] = has(at + k) ? VALUE::widened(words[at + k]) : NOTHING;
    return found;
  }
  template <bool WHOLE> METHOD void put(u64 at, Quad quad) const {
    if (WHOLE) return put_quad<VALUE, true>(words, at, end, quad);
    for (u32 k = 0; k < QUAD; ++k)
      if (has(at + k)) words[at + k] = VALUE::narrowed(quad.at[k]);
  }
};

struct Sums { float greatest, total; }; // total: of exp(x - greatest)

template <bool WHOLE> DEVICE void take_span(Sums& sums, const Row& row, u64 at) {
  Quad quads[AHEAD];
  float greatest = sums.greatest;
#pragma unroll
  for (u32 a = 0; a < AHEAD; ++a) quads[a] = row.quad<WHOLE>(at + a * STEP);
#pragma unroll
  for (u32 a = 0; a < AHEAD; ++a)
    for (u32 k = 0; k < QUAD; ++k) greatest = greatest < quads[a].at[k] ? quads[a].at[k] : greatest;
  float total = sums.total * exp_of(sums.greatest - greatest);
#pragma unroll
  for (u32 a = 0; a < AHEAD; ++a)
    for (u32 k = 0; k < QUAD; ++k) total += exp_of(quads[a].at[k] - greatest);
  sums.greatest = greatest;
  sums.total = total;
}

// logits (groups, size); targets (groups,), of which those from `first` on are of this part -> own, scores (groups,) fp32.
KERNEL statistics(Word* logits, const i64* targets, u64 first, float* own, float* scores, u64 size, u64 groups) {
  if (group() >= groups) return;
  Row row(logits, group(), size);
  Sums sums{LOWEST, 0};
  for (u64 at = 0; at < row.end; at += SPAN) {
    if (row.has_span(at)) take_span<true>(sums, row, at + lane() * QUAD);
    else take_span<false>(sums, row, at + lane() * QUAD);
  }
  float greatest = max_of_lanes(sums.greatest);
  float total = sum_of_lanes(sums.total * exp_of(sums.greatest - greatest));
  if (lane()) return;
  u64 target = (u64)targets[group()] - first; // of another part: beyond the size
  own[group()] = greatest + log_of(total);
  scores[group()] = target < size ? VALUE::widened(row.words[row.begin + target]) : 0;
}

template <bool WHOLE> DEVICE void put_span(const Row& row, u64 at, float normaliser, float weight, u64 target) {
  Quad quads[AHEAD];
#pragma unroll
  for (u32 a = 0; a < AHEAD; ++a) quads[a] = row.quad<WHOLE>(at + a * STEP);
#pragma unroll
  for (u32 a = 0; a < AHEAD; ++a) {
    for (u32 k = 0; k < QUAD; ++k) {
      float share = exp_of(quads[a].at[k] - normaliser) * weight;
      quads[a].at[k] = at + a * STEP + k == target ? share - weight : share;
    }
    row.put<WHOLE>(at + a * STEP, quads[a]);
  }
}

// normaliser (groups,) fp32, of the whole vocabulary; upstream (groups,) fp32, the weight of each token.
KERNEL gradient(Word* logits, const float* normaliser, const i64* targets, u64 first, const float* upstream, u64 size, u64 groups) {
  if (group() >= groups) return;
  Row row(logits, group(), size);
  i64 target = targets[group()];
  float weight = target == IGNORED ? 0 : upstream[group()], all = normaliser[group()];
  u64 mine = (u64)target - first, place = mine < size ? row.begin + mine : ~0ull;
  for (u64 at = 0; at < row.end; at += SPAN) {
    if (row.has_span(at)) put_span<true>(row, at + lane() * QUAD, all, weight, place);
    else put_span<false>(row, at + lane() * QUAD, all, weight, place);
  }
}
