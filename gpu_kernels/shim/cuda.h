/* What the .cuh files need of CUDA, for NVRTC and for g++. Under g++ one block runs at a time, its
 * threads as fibers on one CPU thread, and every barrier is a switch: slow, deterministic, and
 * the same source. Included before everything else in a .cuh. */
#ifndef TORPOR_SHIM_CUDA_H
#define TORPOR_SHIM_CUDA_H
#include <stdint.h>

#ifndef __CUDACC__

#define __global__
#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __shared__ static /* one block at a time */
#define __launch_bounds__(...)

struct shim_index {
    uint32_t x, y;
};
extern shim_index threadIdx, blockIdx, blockDim;

/* Barriers: of the block, and of the 32 threads of a warp with a vote or a value. */
void __syncthreads();
uint32_t __ballot_sync(uint32_t mask, int vote);
uint32_t __shfl_up_sync(uint32_t mask, uint32_t value, uint32_t by);
uint32_t __shfl_sync(uint32_t mask, uint32_t value, int from);

inline uint32_t atomicAdd(uint32_t *at, uint32_t value) {
    uint32_t before = *at;
    *at += value;
    return before;
}
inline uint32_t atomicMax(uint32_t *at, uint32_t value) {
    uint32_t before = *at;
    *at = before < value ? value : before;
    return before;
}
inline int __popc(uint32_t value) { return __builtin_popcount(value); }
inline int __clz(uint32_t value) { return value ? __builtin_clz(value) : 32; }
inline uint32_t __umulhi(uint32_t a, uint32_t b) { return (uint32_t)((uint64_t)a * b >> 32); }

#endif
#endif
