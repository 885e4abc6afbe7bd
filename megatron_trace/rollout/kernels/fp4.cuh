// NVFP4 in registers: words of packed codes to FP16 pairs, and the tensor core operations on them.
//
// A code is s eem (E2M1). An FP16 with sign s, exponent bits ee and first mantissa bit m is the
// code's value times 2^-14, the subnormal 0.5 included. Times its block scale (E4M3, at most 448)
// it is a multiple of 2^-24 below 1: exact in FP16. UNIT undoes the 2^-14.
#pragma once
#include <cstdint>

constexpr float UNIT = 16384.0f;

__device__ __forceinline__ uint32_t bytes_of(uint32_t a, uint32_t b, uint32_t selector) {
    return __byte_perm(a, b, selector);
}

// (a & b) | c
__device__ __forceinline__ uint32_t and_or(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
    return r;
}

// Codes 0 to 7 of a word, code i in bits 4 i to 4 i + 3, as pairs (0, 4), (1, 5), (2, 6), (3, 7).
__device__ __forceinline__ void decode(uint32_t word, uint32_t (&pairs)[4]) {
    // High bytes of FP16 numbers: those of codes 0, 2, 4, 6, then those of 1, 3, 5, 7.
    uint32_t even = and_or(word << 4, 0x80808080u, (word << 1) & 0x0E0E0E0Eu);
    uint32_t odd = and_or(word, 0x80808080u, (word >> 3) & 0x0E0E0E0Eu);
    pairs[0] = bytes_of(even, 0, 0x2404);
    pairs[1] = bytes_of(odd, 0, 0x2404);
    pairs[2] = even & 0xFF00FF00u;
    pairs[3] = odd & 0xFF00FF00u;
}

// Bits of `a` where the mask has 0, of `b` where it has 1.
__device__ __forceinline__ uint32_t chosen_bits(uint32_t a, uint32_t b, uint32_t mask) {
    uint32_t r;
    asm("lop3.b32 %0, %1, %2, %3, 0xD8;" : "=r"(r) : "r"(a), "r"(b), "r"(mask));
    return r;
}

// `decode` by as many operations, of which fewer are the logic pipe's: multiplications shift.
__device__ __forceinline__ void decode_by_shifts(uint32_t word, uint32_t (&pairs)[4]) {
    // As in `decode`, with bits of others between, which the last mask takes away.
    uint32_t even = chosen_bits(word << 4, word << 1, 0x0E0E0E0Eu);
    uint32_t odd = chosen_bits(word, word >> 3, 0x0E0E0E0Eu);
    pairs[0] = (even << 8) & 0x8E008E00u;
    pairs[1] = (odd << 8) & 0x8E008E00u;
    pairs[2] = even & 0x8E008E00u;
    pairs[3] = odd & 0x8E008E00u;
}

__device__ __forceinline__ uint32_t times(uint32_t a, uint32_t b) {
    uint32_t r;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
    return r;
}

// Two E4M3 bytes as an FP16 pair, the low byte in the low half.
__device__ __forceinline__ uint32_t scales_of(uint32_t two_bytes) {
    uint32_t r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(static_cast<uint16_t>(two_bytes)));
    return r;
}

__device__ __forceinline__ uint32_t low_twice(uint32_t pair) { return bytes_of(pair, 0, 0x1010); }
__device__ __forceinline__ uint32_t high_twice(uint32_t pair) { return bytes_of(pair, 0, 0x3232); }

__device__ __forceinline__ uint32_t pair_of(float low, float high) {
    uint32_t r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// c += a b, m16n8k16, FP16 operands.
__device__ __forceinline__ void multiply_add(
    float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// An 8 x 8 matrix of FP16, a row in four neighbouring lanes, transposed.
__device__ __forceinline__ uint32_t transposed(uint32_t row) {
    uint32_t r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(row));
    return r;
}

__device__ __forceinline__ float exp2_of(float x) {
    float r;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
    return r;
}

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint32_t barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier));
}

__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(num_bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "again:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\nbra again;\nfinished:\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Copies from global to shared memory; `barrier` counts the bytes.
__device__ __forceinline__ void copy_async(
    uint32_t to, const void* from, uint32_t num_bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(to),
        "l"(from), "r"(num_bytes), "r"(barrier)
        : "memory");
}
