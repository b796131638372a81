/* Byte planes on a GPU; the twin is planes.c, the format docs/planes.md.
 *
 * Launch: 256 threads, grid (ceil(elements / 8 / 256), jobs): a thread takes 8 elements, which it
 * loads as 16-byte words and stores as 8 bytes of each plane.
 *
 * Bounds: `plain` holds elements * width bytes; plane p is the `elements` bytes at
 * planes + p * stride. Both addresses and the stride are multiples of 16.
 */
#ifndef TORPOR_PLANES_CUH
#define TORPOR_PLANES_CUH
#include "../shim/cuda.h"

struct planes_job {
    uint64_t plain, planes, elements, stride, width, rotate;
};

/* The top 16 bits, turned by one bit; for an element in the low 8 * WIDTH bits. */
template <int WIDTH>
__device__ __forceinline__ uint64_t turn_top(uint64_t element, bool left) {
    const int shift = 8 * WIDTH - 16;
    uint64_t top = element >> shift & 0xffff;
    uint64_t turned = left ? (top << 1 | top >> 15) : (top >> 1 | top << 15);
    return (element & ~((uint64_t)0xffff << shift)) | (turned & 0xffff) << shift;
}

template <int WIDTH, bool ROTATE>
__device__ void split_eight(const planes_job &job, uint64_t first) {
    const uint8_t *plain = (const uint8_t *)job.plain + first * WIDTH;
    uint8_t *planes = (uint8_t *)job.planes + first;
    uint64_t words[WIDTH], out[WIDTH] = {};
    bool whole = first + 8 <= job.elements;
    uint32_t count = whole ? 8 : (uint32_t)(job.elements - first);
    for (int w = 0; w < WIDTH; w++) {
        words[w] = 0;
        if (whole)
            words[w] = ((const uint64_t *)plain)[w];
        else
            for (uint32_t i = 8 * w; i < 8 * w + 8u && i < count * WIDTH; i++)
                words[w] |= (uint64_t)plain[i] << 8 * (i & 7);
    }
    for (int e = 0; e < 8; e++) {
        uint64_t element = words[e * WIDTH / 8] >> 8 * (e * WIDTH % 8);
        element = ROTATE ? turn_top<WIDTH>(element, true) : element;
        for (int p = 0; p < WIDTH; p++)
            out[p] |= (element >> 8 * (WIDTH - 1 - p) & 255) << 8 * e;
    }
    for (int p = 0; p < WIDTH; p++)
        if (whole)
            *(uint64_t *)(planes + p * job.stride) = out[p];
        else
            for (uint32_t e = 0; e < count; e++)
                planes[p * job.stride + e] = (uint8_t)(out[p] >> 8 * e);
}

template <int WIDTH, bool ROTATE>
__device__ void join_eight(const planes_job &job, uint64_t first) {
    uint8_t *plain = (uint8_t *)job.plain + first * WIDTH;
    const uint8_t *planes = (const uint8_t *)job.planes + first;
    uint64_t words[WIDTH] = {}, in[WIDTH];
    bool whole = first + 8 <= job.elements;
    uint32_t count = whole ? 8 : (uint32_t)(job.elements - first);
    for (int p = 0; p < WIDTH; p++) {
        in[p] = 0;
        if (whole)
            in[p] = *(const uint64_t *)(planes + p * job.stride);
        else
            for (uint32_t e = 0; e < count; e++)
                in[p] |= (uint64_t)planes[p * job.stride + e] << 8 * e;
    }
    for (int e = 0; e < 8; e++) {
        uint64_t element = 0;
        for (int p = 0; p < WIDTH; p++)
            element |= (in[p] >> 8 * e & 255) << 8 * (WIDTH - 1 - p);
        element = ROTATE ? turn_top<WIDTH>(element, false) : element;
        words[e * WIDTH / 8] |= element << 8 * (e * WIDTH % 8);
    }
    for (int w = 0; w < WIDTH; w++)
        if (whole)
            ((uint64_t *)plain)[w] = words[w];
        else
            for (uint32_t i = 8 * w; i < 8 * w + 8u && i < count * WIDTH; i++)
                plain[i] = (uint8_t)(words[w] >> 8 * (i & 7));
}

#define TORPOR_FOR_WIDTH(EIGHT)                                                                  \
    uint64_t first = ((uint64_t)blockIdx.x * blockDim.x + threadIdx.x) * 8;                      \
    const planes_job job = jobs[blockIdx.y];                                                     \
    if (first >= job.elements)                                                                   \
        return;                                                                                  \
    if (job.width == 2)                                                                          \
        job.rotate ? EIGHT<2, true>(job, first) : EIGHT<2, false>(job, first);                   \
    else if (job.width == 4)                                                                     \
        job.rotate ? EIGHT<4, true>(job, first) : EIGHT<4, false>(job, first);                   \
    else if (job.width == 8)                                                                     \
        job.rotate ? EIGHT<8, true>(job, first) : EIGHT<8, false>(job, first);

extern "C" __global__ void planes_split(const planes_job *jobs) { TORPOR_FOR_WIDTH(split_eight) }
extern "C" __global__ void planes_join(const planes_job *jobs) { TORPOR_FOR_WIDTH(join_eight) }
#endif
