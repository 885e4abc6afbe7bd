// How fast FP4 lines can be loaded, decoded, and multiplied, with no softmax and no pages.
#include <cuda_runtime.h>

#include "fp4.cuh"

namespace {

// A line is 144 bytes: 128 of codes, then 16 block scales. Four threads have a line.
template <int MODE>
__global__ void read(const uint8_t* lines, float* out, long long num_lines) {
    long long thread = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    long long step = static_cast<long long>(gridDim.x) * blockDim.x / 4;
    int t = threadIdx.x % 4;
    uint32_t kept = 0;
    float sums[8][4] = {};
    for (long long line = thread / 4; line < num_lines; line += step) {
        const uint8_t* from = lines + line * 144;
        uint4 two[2] = {__ldcs(reinterpret_cast<const uint4*>(from + 32 * t)),
                        __ldcs(reinterpret_cast<const uint4*>(from + 32 * t + 16))};
        uint32_t scales = __ldcs(reinterpret_cast<const uint32_t*>(from + 128 + 4 * t));
        uint32_t words[8] = {two[0].x, two[0].y, two[0].z, two[0].w,
                             two[1].x, two[1].y, two[1].z, two[1].w};
        if constexpr (MODE == 0) {
            for (int i = 0; i < 8; ++i) kept ^= words[i];
            kept ^= scales;
        } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            uint32_t pair = scales_of(i < 4 ? scales : scales >> 16);
            uint32_t twice = i / 2 % 2 ? high_twice(pair) : low_twice(pair);
            uint32_t pairs[4];
            decode(words[i], pairs);
#pragma unroll
            for (int j = 0; j < 4; ++j) pairs[j] = times(pairs[j], twice);
            if (MODE == 1) {
                // One operation for two values, as little as can keep them.
                kept ^= pairs[0] ^ pairs[1];
                kept ^= pairs[2] ^ pairs[3];
            } else {
                multiply_add(sums[i], pairs[0], pairs[1], pairs[2], pairs[3], 0x3C003C00u,
                             0x3C003C00u);
            }
        }
        }
    }
    float sum = __uint_as_float(kept);
    for (int i = 0; i < 8; ++i) sum += sums[i][0] + sums[i][1] + sums[i][2] + sums[i][3];
    out[thread] = sum;
}

}  // namespace

extern "C" int trace_ceiling(
    const void* lines, void* out, long long num_lines, int mode, int num_blocks, void* stream) {
    auto from = static_cast<const uint8_t*>(lines);
    auto to = static_cast<float*>(out);
    auto on = static_cast<cudaStream_t>(stream);
    if (mode == 0) read<0><<<num_blocks, 128, 0, on>>>(from, to, num_lines);
    if (mode == 1) read<1><<<num_blocks, 128, 0, on>>>(from, to, num_lines);
    if (mode == 2) read<2><<<num_blocks, 128, 0, on>>>(from, to, num_lines);
    return cudaGetLastError();
}
