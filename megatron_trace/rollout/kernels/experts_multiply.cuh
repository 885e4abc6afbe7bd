// The products, SwiGLU and quantisation between them: the second of the experts' three kernels.
#pragma once
#include "experts_loader.cuh"
#include "experts_quantise.cuh"

// What a build leaves out, to measure the rest: 1 decodes nothing, 2 loads no tokens.
#ifndef EXPERT_CEILING
#define EXPERT_CEILING 0
#endif

namespace {

// The item that a warp multiplies.
struct Item {
    Part part;
    int num_stages, row, group;
    float global;
    int slots[GROUP_SLOTS / 8];
};

__device__ __forceinline__ uint4 load_16(uint32_t from) {
    uint4 r;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r.x), "=r"(r.y), "=r"(r.z), "=r"(r.w)
                 : "r"(from));
    return r;
}

__device__ __forceinline__ uint32_t load_4(uint32_t from) {
    uint32_t r;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(r) : "r"(from));
    return r;
}

[[maybe_unused]] __device__ __forceinline__ uint32_t word_of(const uint4& four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// What lies `WORD` words of codes after `from`.
template <int WORD>
__device__ __forceinline__ void load_operands(uint4& to, const uint4* from) {
#if EXPERT_CEILING != 2
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4 + %5];"
                 : "=r"(to.x), "=r"(to.y), "=r"(to.z), "=r"(to.w)
                 : "l"(from), "n"(WORD * 64));
#endif
}

// Where a lane's operands are of a token. Where there is none they are those of the group's first
// token: of the columns of an MMA that have no token nothing is stored.
__device__ __forceinline__ const uint4* operands_of(
    const Arguments& a, const Item& item, int n, int lane) {
    bool first = item.part == Part::FC1;
    int other = __shfl_sync(~0u, item.slots[0], 0);
    int row = item.slots[n] >= 0 ? item.slots[n] : other;
    // Exact, as there are at most MAX_SLOTS.
    if (first) row = static_cast<int>((static_cast<float>(row) + 0.5f) * a.tokens_of_slot);
    return reinterpret_cast<const uint4*>(first ? a.operands1 : a.operands2) +
           static_cast<int64_t>(row) * ((first ? a.hidden : a.width) / 8) + lane % 4;
}

// Of codes that a thread has of a row of a stage.
[[maybe_unused]] constexpr int WORDS = CHUNK / 32;

// Words whose tokens' operands are loaded together.
template <int NT>
constexpr int PART = 4 / NT;

// Operands of tokens: four of the current part and four of the next one, by turns.
using Operands = uint4[8];

template <int NT>
__device__ __forceinline__ constexpr int place_of(int word, int n) {
    return (word / PART<NT> % 2 * PART<NT> + word % PART<NT>) * NT + n;
}

template <int NT, int WORD>
__device__ __forceinline__ void load_part(Operands& operands, const uint4* const (&from)[NT]) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        load_operands<WORD>(operands[place_of<NT>(WORD, n)], from[n]);
        load_operands<WORD + 1>(operands[place_of<NT>(WORD + 1, n)], from[n]);
        if constexpr (PART<NT> == 4) {
            load_operands<WORD + 2>(operands[place_of<NT>(WORD + 2, n)], from[n]);
            load_operands<WORD + 3>(operands[place_of<NT>(WORD + 3, n)], from[n]);
        }
    }
}

// sums += weights of an item times its tokens. Sums are in units of 2^-28.
template <int NT>
__device__ __forceinline__ void multiply(
    const Arguments& a, const Maps& maps, const Item& item, Loader& loader, Reader& reader,
    float (&sums)[2][2][4]) {
    int lane = loader.lane, g = lane / 4, t = lane % 4;
    const uint4* from[NT];
#pragma unroll
    for (int n = 0; n < NT; ++n) from[n] = operands_of(a, item, n, lane);
    Operands operands{};
    load_part<NT, 0>(operands, from);
#pragma unroll 1
    for (int step = 0; step < item.num_stages; ++step) {
        barrier_wait(loader.barriers + reader.stage * 8, reader.parity);
        if (step % 2 == 0) reader.scale_stage ^= 1;
        uint32_t scales = loader.ring + STAGES * CODE_BYTES + reader.scale_stage * SCALE_BYTES +
                          g * 32 + ((step % 2) ^ (g / 4)) * 16 + t * 4;
        uint32_t codes = loader.ring + reader.stage * CODE_BYTES + g * 128;
        uint32_t bytes[2][2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int run = 0; run < 2; ++run)
                bytes[m][run] = load_4(scales + (run * 16 + m * 8) * 32);
        }
        // What is loaded takes the place of what was read before these.
        __syncwarp();
        loader.load(a, maps);
        reader.advance();
#pragma unroll
        for (int unit = 0; unit < 2; ++unit) {
            uint4 words[2][2];
            uint32_t pair[2][2];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
#pragma unroll
                for (int run = 0; run < 2; ++run) {
                    words[m][run] = load_16(codes + (run * 16 + m * 8) * 128 +
                                            ((2 * t + unit) ^ g) * 16);
                    pair[m][run] = scales_of(bytes[m][run] >> (16 * unit));
                }
            }
#if EXPERT_CEILING == 1
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                uint4 p = words[m][0], q = words[m][1];
                sums[0][m][unit] += __uint_as_float(p.x ^ p.y ^ p.z ^ p.w ^ pair[m][0]);
                sums[0][m][2 + unit] += __uint_as_float(q.x ^ q.y ^ q.z ^ q.w ^ pair[m][1]);
            }
#else
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                int word = unit * 4 + i;
                if (word % PART<NT> == 0) {
                    int next = (word + PART<NT>) % WORDS;
                    if (next == 0 && step + 1 < item.num_stages) {
#pragma unroll
                        for (int n = 0; n < NT; ++n) from[n] += CHUNK / 8;
                    }
                    if (next == 0) load_part<NT, 0>(operands, from);
                    if (next == 2) load_part<NT, 2>(operands, from);
                    if (next == 4) load_part<NT, 4>(operands, from);
                    if (next == 6) load_part<NT, 6>(operands, from);
                    // Keeps the compiler from putting these loads off until they are needed.
                    __syncwarp();
                }
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    uint32_t pairs[2][4];
#pragma unroll
                    for (int run = 0; run < 2; ++run) {
                        uint32_t twice =
                            i < 2 ? low_twice(pair[m][run]) : high_twice(pair[m][run]);
                        decode_by_shifts(word_of(words[m][run], i), pairs[run]);
#pragma unroll
                        for (int j = 0; j < 4; ++j) pairs[run][j] = times(pairs[run][j], twice);
                    }
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        const uint4& token = operands[place_of<NT>(word, n)];
                        multiply_add(sums[n][m], pairs[0][0], pairs[1][0], pairs[0][1],
                                     pairs[1][1], token.x, token.y);
                        multiply_add(sums[n][m], pairs[0][2], pairs[1][2], pairs[0][3],
                                     pairs[1][3], token.z, token.w);
                    }
                }
            }
#endif
        }
    }
}

// Both rounded to BF16.
__device__ __forceinline__ float2 rounded(float first, float second) {
    return __bfloat1622float2(__floats2bfloat162_rn(first, second));
}

// Rows 2 t and 2 t + 1 of token g, from row g of tokens 2 t and 2 t + 1.
__device__ __forceinline__ __nv_bfloat162 rows_of_token(float first, float second) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
    uint32_t result = transposed(*reinterpret_cast<uint32_t*>(&pair));
    return *reinterpret_cast<__nv_bfloat162*>(&result);
}

// Whether `quotient` divides a number by 1 + exp(-number) as `/` does.
__device__ __forceinline__ bool is_plain(float gate) {
    return fabsf(gate) >= SMALL && fabsf(gate) <= 60.0f;
}

// SwiGLU of 16 neighbouring values of fc2's input, quantised and recorded, for eight tokens.
__device__ __forceinline__ void finish_fc1(
    const Arguments& a, const Item& item, int slot, int lane, float factor, float global,
    const float (&sums)[2][4]) {
    int t = lane % 4;
    // Of a token, values 8 m + 2 t and the one after it.
    __nv_bfloat162 values[2];
    float gates[2][2], ups[2][2];
    bool plain = true;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float2 both = rounded(sums[m][i] * factor, sums[m][2 + i] * factor);
            gates[m][i] = both.x;
            ups[m][i] = both.y;
            plain = plain && is_plain(gates[m][i]);
        }
    }
    if (__all_sync(~0u, plain)) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float divisor = 1.0f + expf(-gates[m][i]);
                gates[m][i] = quotient(gates[m][i], divisor, reciprocal(divisor));
            }
        }
    } else {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int i = 0; i < 2; ++i) gates[m][i] = gates[m][i] / (1.0f + expf(-gates[m][i]));
        }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        float2 silu = rounded(gates[m][0], gates[m][1]);
        values[m] = rows_of_token(silu.x * ups[m][0], silu.y * ups[m][1]);
    }
    float2 both[2] = {__bfloat1622float2(values[0]), __bfloat1622float2(values[1])};
    float amax = max_of(max_of(fabsf(both[0].x), fabsf(both[0].y)),
                        max_of(fabsf(both[1].x), fabsf(both[1].y)));
#pragma unroll
    for (int step = 1; step < 4; step *= 2)
        amax = max_of(amax, __shfl_xor_sync(~0u, amax, step));
    float effective;
    uint32_t byte = block_scale(amax, global, effective);
    Divisor divisor(effective);
    // Two codes of a word's eight; lanes of odd t go on with the upper word.
    uint32_t own = (divisor.code_of(both[0].x) | divisor.code_of(both[0].y) << 4) << 8 * t;
    uint32_t other = (divisor.code_of(both[1].x) | divisor.code_of(both[1].y) << 4) << 8 * t;
    if (effective == 0.0f) own = other = 0;
    int which = t % 2;
    uint32_t word = (which ? other : own) | __shfl_xor_sync(~0u, which ? own : other, 1);
    word |= __shfl_xor_sync(~0u, word, 2);
    if (slot < 0) return;
    int64_t at = static_cast<int64_t>(slot) * a.width + item.row;
    if (t < 2) {
        auto* row = reinterpret_cast<uint8_t*>(a.operands2 + static_cast<int64_t>(slot) * a.width);
        *reinterpret_cast<uint4*>(row + operand_offset(item.row + 8 * t)) =
            scaled_operands(word, byte);
        *reinterpret_cast<uint32_t*>(a.input_codes2 + at / 2 + 4 * t) = word;
    }
    if (t == 2) a.input_scales2[at / 16] = static_cast<uint8_t>(byte);
    if (a.activations != nullptr) {
#pragma unroll
        for (int m = 0; m < 2; ++m)
            *reinterpret_cast<__nv_bfloat162*>(a.activations + at + 8 * m + 2 * t) = values[m];
    }
}

__device__ __forceinline__ void finish_fc2(
    const Arguments& a, const Item& item, int slot, int lane, float factor,
    const float (&sums)[2][4]) {
    auto* row = a.products + static_cast<int64_t>(slot) * a.hidden + item.row + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int run = 0; run < 2; ++run) {
            __nv_bfloat162 two =
                rows_of_token(sums[m][2 * run] * factor, sums[m][2 * run + 1] * factor);
            if (slot >= 0) *reinterpret_cast<__nv_bfloat162*>(row + run * 16 + m * 8) = two;
        }
    }
}

// Until fc1 is done for a group.
__device__ __forceinline__ void await_fc1(
    const Arguments& a, int group, const Loader& loader, bool& all_done) {
    if (all_done) return;
    bool done = false;
    while (!done) {
        int count = 0;
        if (loader.lane < 2) count = load_acquired(a.counts + (loader.lane == 0 ? 1 : 3 + group));
        all_done = __shfl_sync(~0u, count, 0) == loader.schedule.num_groups * a.items1;
        done = all_done || __shfl_sync(~0u, count, 1) == a.items1;
        if (!done) __nanosleep(40);
    }
    __syncwarp();
}

// Says that an item of fc1 is done. (`__threadfence` would empty the L1 cache, tokens and all.)
__device__ __forceinline__ void report_fc1(const Arguments& a, const Item& item, int lane) {
    __syncwarp();
    if (lane < 2) add_released(a.counts + (lane == 0 ? 1 : 3 + item.group));
}

__device__ __forceinline__ void process(
    const Arguments& a, const Maps& maps, const Item& item, Loader& loader, Reader& reader,
    float2 input_globals) {
    float sums[2][2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[n][0][i] = sums[n][1][i] = 0.0f;
    }
    bool two = loader.num_slots > 8;
    if (two) multiply<2>(a, maps, item, loader, reader, sums);
    else multiply<1>(a, maps, item, loader, reader, sums);
    float unit = item.global * (UNIT * UNIT);
    int slot = item.slots[0];
// Not unrolled, as a program that is too long for the instruction cache is slower.
#pragma unroll 1
    for (int n = 0;; ++n) {
        if (item.part == Part::FC1)
            finish_fc1(a, item, slot, loader.lane, input_globals.x * unit, input_globals.y,
                       sums[0]);
        else
            finish_fc2(a, item, slot, loader.lane, input_globals.y * unit, sums[0]);
        if (n == two) break;
        slot = item.slots[1];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[0][m][i] = sums[1][m][i];
        }
    }
    if (item.part == Part::FC1) report_fc1(a, item, loader.lane);
}

__global__ void __launch_bounds__(THREADS, 1)
    multiply_kernel(const __grid_constant__ Arguments a, const __grid_constant__ Maps maps) {
    extern __shared__ __align__(1024) uint8_t shared[];
    int warp = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 32, 0);
    Loader loader;
    loader.lane = threadIdx.x % 32;
    loader.ring = shared_address(shared) + warp * RING_BYTES;
    loader.barriers = shared_address(shared) + WARPS * RING_BYTES + warp * STAGES * 8;
    if (loader.lane < STAGES) barrier_init(loader.barriers + loader.lane * 8);
    fence_barriers();
    __syncwarp();
    if (warp == 0 && is_elected()) {
        fetch_map(maps.codes1);
        fetch_map(maps.scales1);
        fetch_map(maps.codes2);
        fetch_map(maps.scales2);
    }
    __syncwarp();
    wait_for_previous();
    let_next_start();
    loader.schedule = {a.counts[0]};
    loader.first_of_fc2 = loader.schedule.first_of_fc2(a);
    loader.dealt_rounds = max(
        1, loader.schedule.num_groups * a.items2 / loader.schedule.num_warps() - FREE_ROUNDS);
    loader.start(a);
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; ++i) loader.load(a, maps);
    Reader reader;
    float2 input_globals{*a.input_global1, *a.input_global2};
    bool all_done = false;
    while (loader.part != Part::NONE) {
        Item item{loader.part, loader.num_stages, loader.row, loader.group, loader.global,
                  {loader.slots[0], loader.slots[1]}};
        if (item.part == Part::FC2) await_fc1(a, item.group, loader, all_done);
        process(a, maps, item, loader, reader, input_globals);
    }
}

}  // namespace
