// Quantisation to NVFP4 in registers: divisions without branches, a block's scale, a value's code.
#pragma once
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "fp4.cuh"

namespace {

__device__ __forceinline__ float max_of(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

__device__ __forceinline__ float min_of(float a, float b) {
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

__device__ __forceinline__ float about_one_over(float b) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(b));
    return r;
}

// What `__fdiv_rn` does where no number is tiny or huge, which it asks beforehand: to refine the
// machine's reciprocal, and a product with it.
__device__ __forceinline__ float reciprocal(float b) {
    float r = about_one_over(b);
    return __fmaf_rn(__fmaf_rn(-b, r, 1.0f), r, r);
}

// a / b, `r` being `reciprocal(b)`.
__device__ __forceinline__ float quotient(float a, float b, float r) {
    float q = __fmul_rn(a, r);
    return __fmaf_rn(__fmaf_rn(-b, q, a), r, q);
}

constexpr float SMALL = 8.673617e-19f;  // 2^-60

// Divides by a positive number without a branch: it and what is divided are brought near 1.
struct Divisor {
    float power, scaled, inverse;

    __device__ __forceinline__ explicit Divisor(float b) {
        uint32_t exponent = min(__float_as_uint(b) >> 23, 253u);
        power = __uint_as_float((254u - exponent) << 23);
        scaled = __fmul_rn(b, power);
        inverse = reciprocal(scaled);
    }

    // Magnitudes whose quotient is at most 2^-20 may give anything as small.
    __device__ __forceinline__ float divide(float magnitude) const {
        return quotient(__fmul_rn(magnitude, power), scaled, inverse);
    }

    // To nearest, ties to the even code; 7 for NaN; anything where the divisor is 0.
    __device__ __forceinline__ uint32_t code_of(float x) const {
        // As codes go: steps of 1/2 below 2, of 1 below 4, then of 2.
        float magnitude = fminf(divide(fabsf(x)), 6.0f);
        uint32_t exponent = __float_as_uint(fmaxf(magnitude, 1.0f)) & 0x7F800000u;
        float grid = __uint_as_float(exponent + (22u << 23));
        uint32_t steps = __float_as_uint(__fadd_rn(magnitude, grid)) - __float_as_uint(grid);
        return (steps + (exponent >> 22) - 254u) | (__float_as_uint(x) >> 31 << 3);
    }
};

// The block scale of a largest magnitude, and what codes are multiplied by (0 for code 0 only).
__device__ __forceinline__ uint32_t block_scale(float amax, float global, float& effective) {
    Divisor divisor(fmaxf(__fmul_rn(global, 6.0f), 1e-45f));
    // Infinity over anything is not a number in `quotient`.
    float scaled = min_of(__fmul_rn(amax, divisor.power), 1e30f);
    float scale = quotient(scaled, divisor.scaled, divisor.inverse);
    scale = scale < 0.001953125f ? 0.001953125f : scale;
    scale = scale > 448.0f ? 448.0f : scale;
    uint32_t byte = __nv_cvt_float_to_fp8(scale, __NV_SATFINITE, __NV_E4M3) & 0x7F;
    uint32_t pair = scales_of(byte);
    effective = __fmul_rn(__low2float(*reinterpret_cast<__half2*>(&pair)), global);
    if (amax == 0.0f) effective = 0.0f;
    return effective == 0.0f ? 0 : byte;
}

// Eight codes times their block scale, as `multiply` takes them.
__device__ __forceinline__ uint4 scaled_operands(uint32_t word, uint32_t byte) {
    uint32_t pairs[4], twice = low_twice(scales_of(byte));
    decode(word, pairs);
    return make_uint4(times(pairs[0], twice), times(pairs[1], twice), times(pairs[2], twice),
                      times(pairs[3], twice));
}

}  // namespace
