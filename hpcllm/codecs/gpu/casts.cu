// Sums of values that travelled as they are, or as bf16 or fp16. To convert them alone takes torch one pass already.
//
//     rows of 16-bit or 32-bit words + my own addend  -->  sum, fp32 in rank order  -->  the word that travels, and its value
//
// Macros: VALUE (common.cuh); WIRE, which is Fp32, Bf16 or Fp16.

typedef VALUE::Word Word;
typedef WIRE::Word Sent;
const u32 STEPS = 2;

template <bool WHOLE> struct Rows {
  const u8* parts;
  u64 row_bytes, n;
  METHOD Quad row(u64 rank, u64 first) const {
    return quad_at<WIRE, WHOLE>((const Sent*)(parts + rank * row_bytes), first, n);
  }
};

template <bool WHOLE>
DEVICE void sum_group(const u8* parts, u64 row_bytes, u64 ranks, u64 own_rank, Word* own, Sent* sums, u64 n) {
  Rows<WHOLE> rows{parts, row_bytes, n};
  const int ahead = WHOLE ? STEPS : 1;
#pragma unroll ahead
  for (u32 step = 0; step < STEPS; ++step) {
    u64 first = (group() * STEPS + step) * STEP + lane() * QUAD;
    Quad sum = sum_of_ranks<VALUE, WHOLE>(rows, ranks, own_rank, own, first, n);
    for (u32 k = 0; k < QUAD; ++k) sum.at[k] = WIRE::widened(WIRE::narrowed(sum.at[k]));
    put_quad<WIRE, WHOLE>(sums, first, n, sum);
    put_quad<VALUE, WHOLE>(own, first, n, sum);
  }
}

// Row r of `parts` begins with what rank r sent. `sums` may be `own` where VALUE is WIRE.
KERNEL sum_encode(const u8* parts, u64 row_bytes, u64 ranks, u64 own_rank, Word* own, Sent* sums, u64 n, u64 groups) {
  if (group() >= groups) return;
  bool aligned = is_aligned(own) && is_aligned(sums) && is_aligned((const Sent*)parts) && row_bytes % sizeof(Four<Sent>) == 0;
  if (aligned && (group() + 1) * STEPS * STEP <= n) sum_group<true>(parts, row_bytes, ranks, own_rank, own, sums, n);
  else sum_group<false>(parts, row_bytes, ranks, own_rank, own, sums, n);
}
