// The backward pass of RMSNorm of rows of up to 2048 values: x and g are read from memory once, for the gradient of the
// weight, too. A group takes the rows of a part one after another, and its lanes keep their columns of the sum:
//
//     row     g, x, weight --squares, dot--> scale --> gradient of x;   scale x g, added to what the lane has
//     part    its sum --> memory, 4 bytes for each value of 8 rows;  add_parts (rms_norm.cuh) adds up those of all parts
//
// Macro: COLUMNS, quads of a row that a lane takes, width / 128 rounded up; text before: rms_norm.cuh.

template <bool WHOLE>
DEVICE void backward_part(const Word* x, const Word* weight, const Word* g, const Word* of_sum, Word* of_x, float* sums, u64 width, u64 epsilon, u64 begin, u64 end) {
  Quad totals[COLUMNS]{};
  for (u64 row = begin; row < end; ++row) {
    Norm<WHOLE> of{width, row * width};
    float squares = 0, dot = 0;
#pragma unroll
    for (u32 c = 0; c < COLUMNS; ++c) {
      u64 first = c * STEP + lane() * QUAD;
      if (first < width) add_squares(of, x, weight, g, first, squares, dot);
    }
    float scale = scale_of(squares, width, epsilon), along = along_of(scale, dot, width);
#pragma unroll
    for (u32 c = 0; c < COLUMNS; ++c) {
      u64 first = c * STEP + lane() * QUAD;
      if (first >= width) continue;
      Quad quad = of.at(x, first), back = of.at(g, first);
      for (u32 k = 0; k < QUAD; ++k) totals[c].at[k] += scale * quad.at[k] * back.at[k];
      put_gradient(of, quad, back, weight, of_sum, of_x, first, scale, along);
    }
  }
#pragma unroll
  for (u32 c = 0; c < COLUMNS; ++c) {
    u64 first = c * STEP + lane() * QUAD;
    if (first < width) put_quad<Fp32, WHOLE>((u32*)sums, first, width, totals[c]);
  }
}

// x, g, of_sum, of_x: (rows, width); sums: (groups, width) fp32, of `part_rows` rows each.
KERNEL backward_rows(const Word* x, const Word* weight, const Word* g, const Word* of_sum, Word* of_x, float* sums, u64 width, u64 epsilon, u64 rows, u64 part_rows, u64 groups) {
  if (group() >= groups) return;
  float* own = sums + group() * width;
  bool aligned = is_aligned(x) && is_aligned(weight) && is_aligned(g) && is_aligned(of_sum) && is_aligned(of_x) && is_aligned((u32*)own);
  u64 begin = group() * part_rows, end = least(rows, begin + part_rows);
  if (aligned && width % QUAD == 0) backward_part<true>(x, weight, g, of_sum, of_x, own, width, epsilon, begin, end);
  else backward_part<false>(x, weight, g, of_sum, of_x, own, width, epsilon, begin, end);
}
