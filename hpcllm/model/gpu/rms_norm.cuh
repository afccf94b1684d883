// RMSNorm (arXiv:1910.07467) of rows of values, a row a group, and the sum on the residual path in front of it.
//
//     forward            x (+ branch = sum, rounded) --squares--> scale = 1 / sqrt(mean + epsilon);  y = weight scale x
//     backward           g, x, weight --squares, dot--> gradient of x (+ that of the sum); scale, kept for
//     weight_gradient    scale x g, summed over the rows of a part, 128 columns a group
//     add_parts          sums of all parts, 8 columns a group --> gradient of the weight
//
// backward and weight_gradient are for rows that are too long for rms_norm_rows.cuh, which makes one pass of both.
// Rows are read twice, the second time from the cache. A pointer of 0: there is no branch, or no gradient of the sum.

template <bool WHOLE> struct Norm {
  u64 width, row; // row: of its first value
  METHOD Quad at(const Word* values, u64 first) const { return quad_at<VALUE, WHOLE>(values + row, first, width); }
  METHOD Quad weight(const Word* values, u64 first) const { return quad_at<VALUE, WHOLE>(values, first, width); }
  METHOD void put(Word* values, u64 first, Quad quad) const { put_quad<VALUE, WHOLE>(values + row, first, width, quad); }
};

DEVICE float scale_of(float squares, u64 width, u64 epsilon) {
  return 1.0f / root_of(sum_of_lanes(squares) / (float)width + float_of((u32)epsilon));
}

DEVICE void round_to_value(Quad& quad) {
  for (u32 k = 0; k < QUAD; ++k) quad.at[k] = VALUE::widened(VALUE::narrowed(quad.at[k]));
}

template <bool WHOLE>
DEVICE void forward_row(Norm<WHOLE> of, const Word* x, const Word* branch, const Word* weight, Word* sum, Word* y, u64 epsilon) {
  const int ahead = WHOLE ? AHEAD : 1;
  float squares = 0;
#pragma unroll ahead
  for (u64 first = lane() * QUAD; first < of.width; first += STEP) {
    Quad quad = of.at(x, first);
    if (branch) {
      add(quad, of.at(branch, first));
      round_to_value(quad);
      of.put(sum, first, quad);
    }
    for (u32 k = 0; k < QUAD; ++k) squares += quad.at[k] * quad.at[k];
  }
  float scale = scale_of(squares, of.width, epsilon);
  const Word* normed = branch ? sum : x;
#pragma unroll ahead
  for (u64 first = lane() * QUAD; first < of.width; first += STEP) {
    Quad quad = of.at(normed, first), by = of.weight(weight, first);
    for (u32 k = 0; k < QUAD; ++k) quad.at[k] = quad.at[k] * scale * by.at[k];
    of.put(y, first, quad);
  }
}

// x, branch, sum, y: (groups, width); weight: (width,); epsilon: the bits of a fp32.
KERNEL forward(const Word* x, const Word* branch, const Word* weight, Word* sum, Word* y, u64 width, u64 epsilon, u64 groups) {
  if (group() >= groups) return;
  bool aligned = is_aligned(x) && is_aligned(branch) && is_aligned(weight) && is_aligned(sum) && is_aligned(y);
  u64 row = group() * width;
  if (aligned && width % QUAD == 0) forward_row(Norm<true>{width, row}, x, branch, weight, sum, y, epsilon);
  else forward_row(Norm<false>{width, row}, x, branch, weight, sum, y, epsilon);
}

template <bool WHOLE>
DEVICE void add_squares(Norm<WHOLE> of, const Word* x, const Word* weight, const Word* g, u64 first, float& squares, float& dot) {
  Quad quad = of.at(x, first), by = of.weight(weight, first), back = of.at(g, first);
  for (u32 k = 0; k < QUAD; ++k) {
    squares += quad.at[k] * quad.at[k];
    dot += back.at[k] * by.at[k] * quad.at[k];
  }
}

// What is taken away of x.
DEVICE float along_of(float scale, float dot, u64 width) { return scale * scale * scale * sum_of_lanes(dot) / (float)width; }

template <bool WHOLE>
DEVICE void put_gradient(Norm<WHOLE> of, Quad quad, Quad back, const Word* weight, const Word* of_sum, Word* of_x, u64 first, float scale, float along) {
  Quad by = of.weight(weight, first);
  for (u32 k = 0; k < QUAD; ++k) quad.at[k] = scale * back.at[k] * by.at[k] - along * quad.at[k];
  if (of_sum) add(quad, of.at(of_sum, first));
  of.put(of_x, first, quad);
}

template <bool WHOLE>
DEVICE float backward_row(Norm<WHOLE> of, const Word* x, const Word* weight, const Word* g, const Word* of_sum, Word* of_x, u64 epsilon) {
  const int ahead = WHOLE ? AHEAD : 1;
  float squares = 0, dot = 0;
#pragma unroll ahead
  for (u64 first = lane() * QUAD; first < of.width; first += STEP) add_squares(of, x, weight, g, first, squares, dot);
  float scale = scale_of(squares, of.width, epsilon), along = along_of(scale, dot, of.width);
#pragma unroll ahead
  for (u64 first = lane() * QUAD; first < of.width; first += STEP)
    put_gradient(of, of.at(x, first), of.at(g, first), weight, of_sum, of_x, first, scale, along);
  return scale;
}

// x, g, of_sum, of_x: (groups, width); scales: (groups,) fp32.
KERNEL backward(const Word* x, const Word* weight, const Word* g, const Word* of_sum, Word* of_x, float* scales, u64 width, u64 epsilon, u64 groups) {
  if (group() >= groups) return;
  bool aligned = is_aligned(x) && is_aligned(weight) && is_aligned(g) && is_aligned(of_sum) && is_aligned(of_x);
  u64 row = group() * width;
  float scale = aligned && width % QUAD == 0 ? backward_row(Norm<true>{width, row}, x, weight, g, of_sum, of_x, epsilon)
                                             : backward_row(Norm<false>{width, row}, x, weight, g, of_sum, of_x, epsilon);
  if (lane() == 0) scales[group()] = scale;
}

template <bool WHOLE>
DEVICE void sum_rows(const Word* x, const Word* g, const float* scales, float* sums, u64 begin, u64 end, u64 width, u64 first) {
  const int ahead = WHOLE ? AHEAD : 1;
  Quad total{};
#pragma unroll ahead
  for (u64 row = begin; row < end; ++row) {
    Norm<WHOLE> of{width, row * width};
    Quad quad = of.at(x, first), back = of.at(g, first);
    for (u32 k = 0; k < QUAD; ++k) total.at[k] += scales[row] * quad.at[k] * back.at[k];
  }
  put_quad<Fp32, WHOLE>((u32*)sums, first, width, total);
}

// x, g: (rows, width); sums: (parts, width) fp32, of `part_rows` rows each, to be added up. A group: 128 columns of a part.
KERNEL weight_gradient(const Word* x, const Word* g, const float* scales, float* sums, u64 rows, u64 width, u64 part_rows, u64 groups) {
  if (group() >= groups) return;
  u64 across = (width + STEP - 1) / STEP, part = group() / across, first = group() % across * STEP + lane() * QUAD;
  u64 begin = part * part_rows, end = least(rows, begin + part_rows);
  float* own = sums + part * width;
  if (first >= width) return;
  bool aligned = is_aligned(x) && is_aligned(g) && is_aligned((u32*)own) && width % QUAD == 0;
  if (aligned) sum_rows<true>(x, g, scales, own, begin, end, width, first);
  else sum_rows<false>(x, g, scales, own, begin, end, width, first);
}

const u32 ADDED = 2; // quads that a group adds up: the 32 bytes that memory hands out at once

// sums: (parts, width) fp32; of_weight: (width,). A lane takes every 32nd part, then the lanes add up theirs.
KERNEL add_parts(const float* sums, Word* of_weight, u64 parts, u64 width, u64 groups) {
  if (group() >= groups) return;
  u64 begin = group() * ADDED * QUAD;
  bool aligned = is_aligned((const u32*)sums) && width % QUAD == 0;
  Quad totals[ADDED]{};
#pragma unroll 4
  for (u64 part = lane(); part < parts; part += GROUP) {
    const u32* own = (const u32*)sums + part * width;
    for (u32 q = 0; q < ADDED; ++q) {
      u64 first = begin + q * QUAD;
      if (first < width) add(totals[q], aligned ? quad_at<Fp32, true>(own, first, width) : quad_at<Fp32, false>(own, first, width));
    }
  }
  for (u32 q = 0; q < ADDED; ++q) {
    for (u32 k = 0; k < QUAD; ++k) totals[q].at[k] = sum_of_lanes(totals[q].at[k]);
    if (lane() == 0) put_quad<VALUE, false>(of_weight, begin + q * QUAD, width, totals[q]);
  }
}
