// AdamW (arXiv:1711.05101, algorithm 2) over flat memory, 256 values a group; gradients are read and stay as they are.
//
//     gradient / divisor = g      weight decay = p      mean + (1 - beta1) (g - mean)      beta2 square + (1 - beta2) g g
//     p - rate mean / (root(square) / correction + epsilon)  -->  master weight  --rounded-->  weight of the model
//
// Values are decayed up to the first edge, not decayed up to the second, and so on by turns. Products and sums are fused
// where PyTorch's kernel for the CPU fuses them, so its bits are these.
//
// Macro: VALUE (common.cuh), of the model's weights.

typedef VALUE::Word Word;
const u32 STEPS = 2;
const u64 GROUP_VALUES = STEPS * STEP; // fused_adamw.py says it too

// Numbers of an update, two in each of the kernel's words.
struct Numbers {
  float divisor, decay, fresh, old_squares, fresh_squares, correction, epsilon, rate;
  METHOD Numbers(u64 a, u64 b, u64 c, u64 d)
      : divisor(float_of((u32)a)), decay(float_of((u32)(a >> 32))), fresh(float_of((u32)b)), old_squares(float_of((u32)(b >> 32))),
        fresh_squares(float_of((u32)c)), correction(float_of((u32)(c >> 32))), epsilon(float_of((u32)d)), rate(float_of((u32)(d >> 32))) {}
};

// Tells which values are decayed to a lane that asks for places one after another.
struct Edges {
  const i64* edges;
  u64 count, passed, next; // passed: edges up to the place asked for
  METHOD Edges(const i64* edges, u64 count, u64 first) : edges(edges), count(count), passed(0) {
    for (u64 behind = count; passed < behind;) {
      u64 middle = (passed + behind) / 2;
      if ((u64)edges[middle] <= first) passed = middle + 1;
      else behind = middle;
    }
    find_next();
  }
  METHOD void find_next() { next = passed < count ? (u64)edges[passed] : ~0ull; }
  METHOD bool decays(u64 at) {
    for (; next <= at; find_next()) ++passed;
    return passed % 2 == 0;
  }
};

// Place of value k of a lane: quads where all arrays are aligned, else each lane takes the neighbour of the lane before.
template <bool WHOLE> DEVICE u64 place(u64 begin, u32 k) { return begin + (WHOLE ? lane() * QUAD + k : k * GROUP + lane()); }

template <class Kind, bool WHOLE> DEVICE Quad taken(const typename Kind::Word* values, u64 begin, u64 n) {
  if (WHOLE) return quad_at<Kind, true>(values, place<true>(begin, 0), n);
  Quad quad;
  for (u32 k = 0; k < QUAD; ++k) quad.at[k] = place<false>(begin, k) < n ? Kind::widened(values[place<false>(begin, k)]) : 0;
  return quad;
}

template <class Kind, bool WHOLE> DEVICE void put(typename Kind::Word* values, u64 begin, u64 n, Quad quad) {
  if (WHOLE) return put_quad<Kind, true>(values, place<true>(begin, 0), n, quad);
  for (u32 k = 0; k < QUAD; ++k)
    if (place<false>(begin, k) < n) values[place<false>(begin, k)] = Kind::narrowed(quad.at[k]);
}

DEVICE void update_value(float& weight, float gradient, float& mean, float& square, float decay, const Numbers& by) {
  float g = gradient / by.divisor;
  bool old_counts_more = by.fresh < 0.5f; // then the old mean is moved, else the gradient: torch.lerp
  mean = fused(old_counts_more ? by.fresh : by.fresh - 1.0f, g - mean, old_counts_more ? mean : g);
  square = fused(by.fresh_squares * g, g, square * by.old_squares);
  weight = weight * decay + by.rate * mean / (root_of(square) / by.correction + by.epsilon);
}

struct Values { Quad gradient, mean, square, weight; };

template <bool WHOLE>
DEVICE void update_group(const u32* gradients, u32* means, u32* squares, u32* masters, Word* weights, Edges edges, Numbers by, u64 begin, u64 n) {
  Values values[STEPS];
#pragma unroll
  for (u32 step = 0; step < STEPS; ++step) {
    u64 at = begin + step * STEP;
    values[step] = {taken<Fp32, WHOLE>(gradients, at, n), taken<Fp32, WHOLE>(means, at, n), taken<Fp32, WHOLE>(squares, at, n),
                    taken<Fp32, WHOLE>(masters, at, n)};
  }
#pragma unroll
  for (u32 step = 0; step < STEPS; ++step) {
    u64 at = begin + step * STEP;
    Values& of = values[step];
    for (u32 k = 0; k < QUAD; ++k) {
      float decay = edges.decays(place<WHOLE>(at, k)) ? by.decay : 1.0f;
      update_value(of.weight.at[k], of.gradient.at[k], of.mean.at[k], of.square.at[k], decay, by);
    }
    put<Fp32, WHOLE>(means, at, n, of.mean);
    put<Fp32, WHOLE>(squares, at, n, of.square);
    put<Fp32, WHOLE>(masters, at, n, of.weight);
    if (weights) put<VALUE, WHOLE>(weights, at, n, of.weight);
  }
}

// All arrays: (n,), fp32 but the weights, which may be 0: the masters are the model's own. edges: (count,), ascending.
KERNEL update(const u32* gradients, u32* means, u32* squares, u32* masters, Word* weights, const i64* edges, u64 count, u64 a, u64 b, u64 c, u64 d, u64 n) {
  u64 begin = group() * GROUP_VALUES;
  if (begin >= n) return;
  bool aligned = is_aligned(gradients) && is_aligned(means) && is_aligned(squares) && is_aligned(masters) && is_aligned(weights);
  Edges behind(edges, count, begin);
  Numbers by(a, b, c, d);
  if (aligned && begin + GROUP_VALUES <= n) update_group<true>(gradients, means, squares, masters, weights, behind, by, begin, n);
  else update_group<false>(gradients, means, squares, masters, weights, behind, by, begin, n);
}
