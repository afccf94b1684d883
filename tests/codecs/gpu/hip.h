// What HIP's own headers bring, as far as common.cuh names it, for a clang without ROCm:
//
//     clang -x hip --offload-device-only --offload-arch=gfx942 -nogpuinc -nogpulib -include hip.h
//
// Lanes of a wave read one another's registers by ds_bpermute, which takes 4 times the number of the lane to read. `width`
// lanes are a group: whoever would read beyond it reads its own.

#define __device__ __attribute__((device))
#define __global__ __attribute__((global))
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))

struct Place { unsigned x; };
#define threadIdx (Place{__builtin_amdgcn_workitem_id_x()})
#define blockIdx (Place{__builtin_amdgcn_workgroup_id_x()})
#define warpSize 64

#define HIP static __device__ __forceinline__
HIP int lane_of_wave() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0)); }
HIP int register_of(int x, int from) { return __builtin_amdgcn_ds_bpermute(4 * from, x); }
HIP int __shfl(int x, int from, int width) {
  return register_of(x, (lane_of_wave() & -width) + (from & (width - 1)));
}
HIP int __shfl_xor(int x, int mask, int width) {
  int from = lane_of_wave() ^ mask;
  return register_of(x, from >= (lane_of_wave() & -width) + width ? lane_of_wave() : from);
}
HIP int __shfl_up(int x, unsigned by, int width) {
  int from = lane_of_wave() - (int)by;
  return register_of(x, from < (lane_of_wave() & -width) ? lane_of_wave() : from);
}
HIP int __shfl_down(int x, unsigned by, int width) {
  int from = lane_of_wave() + (int)by;
  return register_of(x, from >= (lane_of_wave() & -width) + width ? lane_of_wave() : from);
}
HIP unsigned long long __ballot(int x) { return __builtin_amdgcn_ballot_w64(x != 0); }

HIP float __uint_as_float(unsigned bits) { return __builtin_bit_cast(float, bits); }
HIP unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
HIP int __popc(unsigned x) { return __builtin_popcount(x); }
HIP int __clz(int x) { return x ? __builtin_clz((unsigned)x) : 32; }
HIP int __ffs(int x) { return __builtin_ffs(x); }
HIP unsigned __brev(unsigned x) { return __builtin_bitreverse32(x); }
HIP float floorf(float x) { return __builtin_floorf(x); }
HIP float expf(float x) { return __builtin_expf(x); }
HIP float logf(float x) { return __builtin_logf(x); }
HIP float sqrtf(float x) { return __builtin_sqrtf(x); }
HIP float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
