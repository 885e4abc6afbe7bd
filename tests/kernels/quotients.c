// Tries the division of megatron_trace/formats/kernels_fp32.py on a CPU, whose FP32 operations are
// those of a GPU, and prints how many quotients it tried: all that could be wrong.
//
// Let the approximate reciprocal be within two units of its last place, and let units be those of
// the quotient's last place. `near` is then within 2 of the quotient; `reciprocal_of`, and the rest
// when it is rounded, are within 2^-24 of themselves, give or take 2^-40. So the last sum lacks at
// most 2 * (2^-24 + 2^-24) = 2^-22, and can be rounded wrongly only if the quotient is that near to
// the middle of two numbers. With mantissas A, D and an odd n, that is |A * 2^k - n * D| <= 8, where
// k is 24 or 25 and n has 25 bits.
#include <fenv.h>
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#define BATCH 4096
#define NUM_NEAR 5
#define LARGEST_REST 8

typedef float batch[BATCH];

// Not inlined, so that no operation crosses a change of the rounding.
__attribute__((noinline)) static void errors(const batch r, const batch d, batch e) {
    for (int i = 0; i < BATCH; i++) e[i] = fmaf(r[i], -d[i], 1.0f);
}
__attribute__((noinline)) static void with_squares(const batch e, batch u) {
    for (int i = 0; i < BATCH; i++) u[i] = fmaf(e[i], e[i], e[i]);
}
__attribute__((noinline)) static void corrected(const batch u, batch r) {
    for (int i = 0; i < BATCH; i++) r[i] = fmaf(u[i], r[i], r[i]);
}

// Makes reciprocals of approximate ones.
static void reciprocals(const batch d, batch r) {
    static batch e, u;
    errors(r, d, e);
    fesetround(FE_UPWARD);
    with_squares(e, u);
    fesetround(FE_TONEAREST);
    corrected(u, r);
}

static void check(float a, float d, float reciprocal, uint64_t *num_tried) {
    float near = a * reciprocal;
    float got = fmaf(fmaf(near, -d, a), reciprocal, near);
    if (got != a / d) {
        printf("%a / %a is %a, not %a\n", a, d, a / d, got);
        exit(1);
    }
    ++*num_tried;
}

// Tries all mantissas A whose quotient by D is nearest to the middle of two numbers.
static void check_divisor(uint64_t D, float reciprocal, uint64_t *num_tried) {
    int twos = __builtin_ctzll(D);
    uint64_t odd = D >> twos, inverse = odd;
    for (int step = 0; step < 5; step++) inverse *= 2 - odd * inverse;
    for (int64_t rest = -LARGEST_REST; rest <= LARGEST_REST; rest++) {
        // n is odd, so that n * D has as many factors of 2 as D, and so has the rest.
        if (rest == 0 || __builtin_ctzll(rest) != twos) continue;
        for (int k = 24; k <= 25; k++) {
            uint64_t modulus = 1ull << (k - twos);
            uint64_t n = -(uint64_t)(rest >> twos) * inverse & (modulus - 1);
            for (; n < 1 << 25; n += modulus) {
                uint64_t A = (n * D + rest) >> k;
                if (n >= 1 << 24 && A >= 1 << 23 && A < 1 << 24)
                    check(ldexpf(A, -23), ldexpf(D, -23), reciprocal, num_tried);
            }
        }
    }
}

int main(void) {
    static batch d, r[NUM_NEAR];
    uint64_t num_tried = 0;
    for (uint32_t first = 1 << 23; first < 1 << 24; first += BATCH) {
        for (int i = 0; i < BATCH; i++) d[i] = ldexpf(first + i, -23);
        for (int near = 0; near < NUM_NEAR; near++) {
            for (int i = 0; i < BATCH; i++) {
                union { float value; int32_t bits; } exact = {1.0f / d[i]};
                exact.bits += near - NUM_NEAR / 2;
                r[near][i] = exact.value;
            }
            reciprocals(d, r[near]);
        }
        for (int i = 0; i < BATCH; i++)
            for (int near = 0; near < NUM_NEAR; near++)
                if (near == 0 || r[near][i] != r[0][i])
                    check_divisor(first + i, r[near][i], &num_tried);
    }
    printf("%llu quotients\n", (unsigned long long)num_tried);
    return 0;
}
