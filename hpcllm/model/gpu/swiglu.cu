// SwiGLU (arXiv:2002.05202): silu(gate) up, in fp32 from one rounding to the next. 512 values a group.
//
//     s = 1 / (1 + exp(-gate))      forward    gate s up
//                                   backward   g gate s  for up;   g up s (1 + gate (1 - s))  for gate
//
// Macro: VALUE (common.cuh).

typedef VALUE::Word Word;
const u32 STEPS = 4;

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + exp_of(-x)); }

template <bool WHOLE> DEVICE void forward_step(const Word* gate, const Word* up, Word* out, u64 first, u64 n) {
  Quad x = quad_at<VALUE, WHOLE>(gate, first, n), y = quad_at<VALUE, WHOLE>(up, first, n);
  for (u32 k = 0; k < QUAD; ++k) x.at[k] = x.at[k] * sigmoid(x.at[k]) * y.at[k];
  put_quad<VALUE, WHOLE>(out, first, n, x);
}

KERNEL forward(const Word* gate, const Word* up, Word* out, u64 n, u64 groups) {
  if (group() >= groups) return;
  u64 begin = group() * STEPS * STEP;
  bool whole = is_aligned(gate) && is_aligned(up) && is_aligned(out) && begin + STEPS * STEP <= n;
#pragma unroll
  for (u32 step = 0; step < STEPS; ++step) {
    u64 first = begin + step * STEP + lane() * QUAD;
    if (whole) forward_step<true>(gate, up, out, first, n);
    else forward_step<false>(gate, up, out, first, n);
  }
}

template <bool WHOLE>
DEVICE void backward_step(const Word* g, const Word* gate, const Word* up, Word* of_gate, Word* of_up, u64 first, u64 n) {
  Quad back = quad_at<VALUE, WHOLE>(g, first, n), x = quad_at<VALUE, WHOLE>(gate, first, n), y = quad_at<VALUE, WHOLE>(up, first, n);
  for (u32 k = 0; k < QUAD; ++k) {
    float s = sigmoid(x.at[k]), along = back.at[k] * s;
    back.at[k] = along * y.at[k] * (1.0f + x.at[k] * (1.0f - s));
    x.at[k] = along * x.at[k];
  }
  put_quad<VALUE, WHOLE>(of_gate, first, n, back);
  put_quad<VALUE, WHOLE>(of_up, first, n, x);
}

KERNEL backward(const Word* g, const Word* gate, const Word* up, Word* of_gate, Word* of_up, u64 n, u64 groups) {
  if (group() >= groups) return;
  u64 begin = group() * STEPS * STEP;
  bool whole = is_aligned(g) && is_aligned(gate) && is_aligned(up) && is_aligned(of_gate) && is_aligned(of_up) && begin + STEPS * STEP <= n;
#pragma unroll
  for (u32 step = 0; step < STEPS; ++step) {
    u64 first = begin + step * STEP + lane() * QUAD;
    if (whole) backward_step<true>(g, gate, up, of_gate, of_up, first, n);
    else backward_step<false>(g, gate, up, of_gate, of_up, first, n);
  }
}
