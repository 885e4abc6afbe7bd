// Routed experts of a layer in NVFP4, for steps of few tokens: weights are read once.
//
// Legend: T tokens, k slots of a token, S = T k slots, E experts, H hidden size, F intermediate
// size of an expert. Weights are as ModelOpt stores them: fc1 [E, 2 F, H], gate above up, and fc2
// [E, H, F], two codes in a byte, an E4M3 scale for 16 columns, an FP32 global scale per expert.
//
// Three kernels, none of which needs the host:
// * `prepare`: one block sorts the slots by expert and cuts the slots of an expert into groups of
//   at most 16; the others quantise the tokens.
// * `multiply`: persistent. Eight warps are a team, which goes from item to item. An item of fc1 is
//   16 gate rows and 16 up rows times a group of slots, all of H; SwiGLU, which it ends with, gives
//   one block of 16 values of fc2's input, quantised at once. An item of fc2 is 32 rows times a
//   group, all of F; it waits until the group's items of fc1 are done. A warp has a slice of 256
//   columns: the team reads whole rows at a time, each warp through its own ring in shared memory,
//   and a warp keeps its slice of the tokens in registers while the group stays. Where rows have
//   fewer than eight slices, an item has as many more rows. The warps' sums meet in shared memory,
//   where those whose turn it is add them up, one item behind.
// * `combine`: adds up the slots of a token in their order, weighted by probability.
//
// Weight rows are the rows of an MMA and tokens its columns. Thread t of 4 holds 64 neighbouring
// columns out of 256, as they are stored. Operands of tokens lie in memory as FP16 in that order:
// 16 bytes are a word of eight codes as `decode` gives them, words of the four threads stand side
// by side. Which column of an MMA a slot takes changes no bit of its result.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "fp4.cuh"

// Teams of a block, and stages of a warp's ring.
#ifndef EXPERT_TEAMS
#define EXPERT_TEAMS 2
#endif
#ifndef EXPERT_STAGES
#define EXPERT_STAGES 2
#endif
#ifndef EXPERT_EIGHTS
#define EXPERT_EIGHTS 2
#endif
#ifndef EXPERT_SLOTS
#define EXPERT_SLOTS 2
#endif
#ifndef EXPERT_ROLLED
#define EXPERT_ROLLED 0
#endif
#ifndef EXPERT_ROUND
#define EXPERT_ROUND 8
#endif
// Bytes that the L2 cache fetches at a copy's first miss: 0 (what is asked for), 128 or 256.
#ifndef EXPERT_FETCH
#define EXPERT_FETCH 256
#endif
// What a build leaves out, to measure the rest: 1 decodes nothing, 2 loads no tokens.
#ifndef EXPERT_CEILING
#define EXPERT_CEILING 0
#endif

namespace {

constexpr int TEAM = 8;  // warps
constexpr int TEAMS = EXPERT_TEAMS;
constexpr int WARPS = TEAM * TEAMS;
constexpr int THREADS = WARPS * 32;
constexpr int MAX_NT = EXPERT_EIGHTS;          // eights of slots
constexpr int GROUP_SLOTS = 8 * MAX_NT;
constexpr int MAX_EXPERTS = 1024;
constexpr int CHUNK = 256;                     // columns of a slice
constexpr int WORDS = CHUNK / 32;              // of a thread and row
constexpr int ROWS = 32;                       // of a warp: two runs of 16
constexpr int STAGES = EXPERT_STAGES;
constexpr int CODE_BYTES = ROWS * CHUNK / 2;
constexpr int SCALE_BYTES = ROWS * CHUNK / 16;
constexpr int STAGE_BYTES = CODE_BYTES + SCALE_BYTES + 16;  // and what it holds
constexpr int SUM_BYTES = 2 * MAX_NT * 512;
constexpr int SLOTS = EXPERT_SLOTS;            // for sums of a team
constexpr int SHARED_BYTES =
    WARPS * STAGES * STAGE_BYTES + TEAMS * SLOTS * (TEAM * SUM_BYTES + 16);
constexpr int ROUND = EXPERT_ROUND;            // items of a team in a row
constexpr int PREPARE_THREADS = 1024;
constexpr int COMBINE_THREADS = 256;

struct Arguments {
    const uint8_t* codes1;
    const uint8_t* scales1;
    const float* globals1;
    const uint8_t* codes2;
    const uint8_t* scales2;
    const float* globals2;
    const float* input_global1;
    const float* input_global2;
    const __nv_bfloat16* x;        // [T, H]
    const int64_t* experts;        // [T, k]; negative: none
    const float* probabilities;    // [T, k]
    __nv_bfloat16* output;         // [T, H]
    uint8_t* input_codes1;         // [T, H / 2]
    uint8_t* input_scales1;        // [T, H / 16]
    uint8_t* input_codes2;         // [S, F / 2]
    uint8_t* input_scales2;        // [S, F / 16]
    __nv_bfloat16* activations;    // [S, F], or null
    __half* operands1;             // [T, H]
    __half* operands2;             // [S, F]
    __nv_bfloat16* products;       // [S, H]
    int* order;                    // [S]: slots by expert
    int4* groups;                  // expert, first place in order, slots
    int* counts;                   // groups; items of fc1 done; of them, those of each group
    int num_tokens, num_slots, num_experts, hidden, width;
};

__device__ __forceinline__ void wait_for_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void let_next_start() {
    asm volatile("griddepcontrol.launch_dependents;");
}

__device__ __forceinline__ float max_of(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

// The block scale of a largest magnitude, and what codes are multiplied by (0 for code 0 only).
__device__ __forceinline__ uint32_t scale_byte(float amax, float global, float& effective) {
    float quotient = __fdiv_rn(amax, __fmul_rn(global, 6.0f));
    quotient = quotient < 0.001953125f ? 0.001953125f : quotient;
    quotient = quotient > 448.0f ? 448.0f : quotient;
    uint32_t byte = __nv_cvt_float_to_fp8(quotient, __NV_SATFINITE, __NV_E4M3) & 0x7F;
    uint32_t pair = scales_of(byte);
    effective = __fmul_rn(__low2float(*reinterpret_cast<__half2*>(&pair)), global);
    if (amax == 0.0f || effective == 0.0f) {
        effective = 0.0f;
        return 0;
    }
    return byte;
}

// To nearest, ties to the even code; 7 for NaN.
__device__ __forceinline__ uint32_t code_of(float x, float effective) {
    if (effective == 0.0f) return 0;
    float a = __fdiv_rn(fabsf(x), effective);
    uint32_t code = !(a <= 0.25f);
    code += !(a < 0.75f);
    code += !(a <= 1.25f);
    code += !(a < 1.75f);
    code += !(a <= 2.5f);
    code += !(a < 3.5f);
    code += !(a <= 5.0f);
    return code | (__float_as_uint(x) >> 31 << 3);
}

// Two codes times a scale byte, as `decode` and `scales_of` have them.
__device__ __forceinline__ uint32_t operand_pair(uint32_t low, uint32_t high, uint32_t byte) {
    uint32_t codes = low | (high << 16);
    return times((codes & 0x00080008u) << 12 | (codes & 0x00070007u) << 9,
                 low_twice(scales_of(byte)));
}

// Whether a slot has an expert.
__device__ __forceinline__ bool is_routed(const Arguments& a, int64_t expert) {
    return expert >= 0 && expert < a.num_experts;
}

// In bytes: where operands of eight columns from `column` on lie in a row.
__device__ __forceinline__ int operand_offset(int column) {
    int in_chunk = column % CHUNK;
    return column / CHUNK * (2 * CHUNK) + in_chunk % 64 / 8 * 64 + in_chunk / 64 * 16;
}

__device__ void sort_slots(const Arguments& a) {
    __shared__ int sizes[MAX_EXPERTS], places[MAX_EXPERTS];
    __shared__ int64_t warp_sums[PREPARE_THREADS / 32];
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    sizes[thread] = 0;
    __syncthreads();
    for (int slot = thread; slot < a.num_slots; slot += PREPARE_THREADS) {
        int64_t expert = a.experts[slot];
        if (is_routed(a, expert)) atomicAdd(&sizes[expert], 1);
    }
    __syncthreads();
    int size = sizes[thread], num_groups = (size + GROUP_SLOTS - 1) / GROUP_SLOTS;
    // Slots in the low half, groups in the high one.
    int64_t own = (static_cast<int64_t>(num_groups) << 32) | size, inclusive = own;
    for (int step = 1; step < 32; step *= 2) {
        int64_t below = __shfl_up_sync(~0u, inclusive, step);
        if (lane >= step) inclusive += below;
    }
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    for (int i = 0; i < warp; ++i) inclusive += warp_sums[i];
    int64_t before = inclusive - own;
    int first = static_cast<int>(before >> 32), start = static_cast<int>(before);
    places[thread] = start;
    if (thread == PREPARE_THREADS - 1) {
        a.counts[0] = static_cast<int>(inclusive >> 32);
        a.counts[1] = 0;
    }
    if (num_groups > 0) {
        int each = ((size + num_groups - 1) / num_groups + 7) / 8 * 8;
        for (int i = 0; i < num_groups; ++i) {
            int slots = max(0, min(each, size - i * each));
            a.groups[first + i] = make_int4(thread, start + i * each, slots, 0);
            a.counts[2 + first + i] = 0;
        }
    }
    __syncthreads();
    for (int slot = thread; slot < a.num_slots; slot += PREPARE_THREADS) {
        int64_t expert = a.experts[slot];
        if (is_routed(a, expert)) a.order[atomicAdd(&places[expert], 1)] = slot;
    }
}

// Quantises 16 neighbouring values of a token.
__device__ void quantise_block(const Arguments& a, int64_t block) {
    const uint4* from = reinterpret_cast<const uint4*>(a.x + block * 16);
    uint4 parts[2] = {from[0], from[1]};
    float values[16];
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(parts);
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        float2 two = __bfloat1622float2(pairs[i]);
        values[2 * i] = two.x;
        values[2 * i + 1] = two.y;
        amax = max_of(amax, max_of(fabsf(two.x), fabsf(two.y)));
    }
    float effective;
    uint32_t byte = scale_byte(amax, *a.input_global1, effective);
    int column = static_cast<int>(block % (a.hidden / 16)) * 16;
    int64_t token = block / (a.hidden / 16);
    auto* operands = reinterpret_cast<uint8_t*>(a.operands1 + token * a.hidden);
    uint32_t words[2];
#pragma unroll
    for (int w = 0; w < 2; ++w) {
        uint32_t codes[8];
        words[w] = 0;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            codes[i] = code_of(values[8 * w + i], effective);
            words[w] |= codes[i] << (4 * i);
        }
        *reinterpret_cast<uint4*>(operands + operand_offset(column + 8 * w)) =
            make_uint4(operand_pair(codes[0], codes[4], byte),
                       operand_pair(codes[1], codes[5], byte),
                       operand_pair(codes[2], codes[6], byte),
                       operand_pair(codes[3], codes[7], byte));
    }
    *reinterpret_cast<uint2*>(a.input_codes1 + block * 8) = make_uint2(words[0], words[1]);
    a.input_scales1[block] = static_cast<uint8_t>(byte);
}

__global__ void __launch_bounds__(PREPARE_THREADS)
    prepare_kernel(const __grid_constant__ Arguments a) {
    wait_for_previous();
    let_next_start();
    if (blockIdx.x == 0) {
        sort_slots(a);
        return;
    }
    int64_t block = static_cast<int64_t>(blockIdx.x - 1) * PREPARE_THREADS + threadIdx.x;
    if (block < static_cast<int64_t>(a.num_tokens) * (a.hidden / 16)) quantise_block(a, block);
}

enum Part : int { FC1, FC2, NONE };

// The items of a team, one after another: runs of UNIT neighbours, which share a group, in rounds
// over all teams, and at last an even share of what is left. First fc1, then fc2, whose last share
// goes to the teams in reverse.
struct Walk {
    int team, num_teams;
    int num_items1, num_items2, of_group1, of_group2;
    int part = FC1, round = 0, left = 0, group = 0, item = 0;

    __device__ __forceinline__ int of_group() const {
        return part == FC1 ? of_group1 : of_group2;
    }

    __device__ __forceinline__ void open() {
        for (; part != NONE; ++part, round = 0) {
            int total = part == FC1 ? num_items1 : num_items2, of_round = num_teams * ROUND;
            int full = total / of_round;
            for (; round <= full; ++round) {
                int who = part == FC1 ? team : num_teams - 1 - team;
                int start = (round * num_teams + who) * ROUND;
                left = ROUND;
                if (round == full) {
                    int rest = total - full * of_round;
                    start = full * of_round + rest * who / num_teams;
                    left = full * of_round + rest * (who + 1) / num_teams - start;
                }
                if (left > 0) {
                    ++round;
                    group = start / of_group();
                    item = start % of_group();
                    return;
                }
            }
        }
    }

    __device__ __forceinline__ void next() {
        if (--left == 0) {
            open();
        } else if (++item == of_group()) {
            item = 0;
            ++group;
        }
    }
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

__device__ __forceinline__ void store_16(uint32_t to, uint4 four) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(four.x), "r"(four.y),
                 "r"(four.z), "r"(four.w)
                 : "memory");
}

__device__ __forceinline__ void copy_16(uint32_t to, const uint8_t* from) {
#if EXPERT_FETCH == 256
    asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16;" ::"r"(to), "l"(from)
                 : "memory");
#elif EXPERT_FETCH == 128
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from)
                 : "memory");
#else
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
#endif
}

// Through the L1 cache: the other half of a sector is for another warp of the team.
__device__ __forceinline__ void copy_half_sector(uint32_t to, const uint8_t* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until the oldest stage is there.
__device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(STAGES - 1) : "memory");
}

// Which part of an item a warp has: a slice of the columns of a block of rows.
struct Share {
    int slices, slice, row_block, row_blocks;

    // There are 1, 2, 4 or 8 slices.
    __device__ __forceinline__ Share(int columns, int warp) : slices(columns / CHUNK) {
        int shift = __ffs(slices) - 1;
        slice = warp & (slices - 1);
        row_block = warp >> shift;
        row_blocks = TEAM >> shift;
    }

    // Whether the warp adds up its row block in this item.
    __device__ __forceinline__ bool adds_up(int number) const {
        return (number & (slices - 1)) == slice;
    }
};

// What a stage holds, as 16 bytes say it.
struct Content {
    uint4 words;

    __device__ __forceinline__ explicit Content(uint32_t stage)
        : words(load_16(stage + CODE_BYTES + SCALE_BYTES)) {}
    __device__ __forceinline__ int part() const { return words.x & 3; }
    __device__ __forceinline__ int num_slots() const { return words.x >> 2 & 63; }
    __device__ __forceinline__ int expert() const { return words.x >> 8; }
    __device__ __forceinline__ int group() const { return words.y; }
    __device__ __forceinline__ int row() const { return words.z; }
    __device__ __forceinline__ int first_slot() const { return words.w; }
};

// Fills a warp's ring with its parts of the team's items.
struct Loader {
    Walk walk;
    uint32_t ring;
    int warp, lane;
    int group = -1;
    int4 slots = make_int4(0, 0, 0, 0);  // of the group

    // Fills a stage; says in it what it holds: see `Content`.
    __device__ __forceinline__ void load(const Arguments& a, int stage) {
        uint32_t to = ring + stage * STAGE_BYTES;
        int row = 0;
        if (walk.part != NONE) {
            bool first = walk.part == FC1;
            int columns = first ? a.hidden : a.width, row_bytes = columns / 2;
            Share share(columns, warp);
            row = (walk.item * share.row_blocks + share.row_block) * (first ? 16 : ROWS);
            if (group != walk.group) {
                group = walk.group;
                slots = a.groups[group];
            }
            int64_t at = static_cast<int64_t>(slots.x) * (first ? 2 * a.width : a.hidden) + row;
            int run_rows = first ? a.width : 16;
            const uint8_t* from = (first ? a.codes1 : a.codes2) + (at + lane / 8) * row_bytes +
                                  share.slice * (CHUNK / 2) + lane % 8 * 16;
            const uint8_t* second = from + run_rows * row_bytes;
            uint32_t place = to + lane / 8 * 128 + ((lane % 8) ^ (lane / 8 % 2)) * 16;
#pragma unroll
            for (int i = 0; i < 4; ++i) copy_16(place + i * 512, from + i * 4 * row_bytes);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                copy_16(place + 2048 + i * 512, second + i * 4 * row_bytes);
            int64_t scale_row = at + lane % 16 + (lane < 16 ? 0 : run_rows);
            copy_half_sector(to + CODE_BYTES + lane * 16,
                             (first ? a.scales1 : a.scales2) + scale_row * (row_bytes / 8) +
                                 share.slice * (CHUNK / 16));
        }
        if (lane == 0)
            store_16(to + CODE_BYTES + SCALE_BYTES,
                     make_uint4(walk.part | slots.z << 2 | slots.x << 8, walk.group, row, slots.y));
        if (walk.part != NONE) walk.next();
        end_copies();
    }
};

__device__ __forceinline__ uint32_t word_of(const uint4& four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// sums = eight rows of both runs of a stage times a warp's slice of the tokens, in units of 2^-28.
template <int NT>
__device__ __forceinline__ void multiply(
    uint32_t stage, int m, int lane, const uint4 (&tokens)[WORDS][NT], float (&sums)[NT][4]) {
    int g = lane / 4, t = lane % 4;
    uint32_t codes = stage + (m * 8 + g) * 128, scales = stage + CODE_BYTES + m * 128 + lane * 4;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[n][i] = 0.0f;
    }
    uint32_t bytes[2] = {load_4(scales), load_4(scales + 256)};
#pragma unroll
    for (int unit = 0; unit < 2; ++unit) {
        uint4 words[2];
        uint32_t pair[2];
#pragma unroll
        for (int run = 0; run < 2; ++run) {
            words[run] = load_16(codes + run * 2048 + ((2 * t + unit) ^ (g % 2)) * 16);
            pair[run] = scales_of(bytes[run] >> (16 * unit));
        }
#if EXPERT_CEILING == 1
        uint4 p = words[0], q = words[1];
        sums[0][unit] = __uint_as_float(p.x ^ p.y ^ p.z ^ p.w ^ pair[0]);
        sums[0][2 + unit] = __uint_as_float(q.x ^ q.y ^ q.z ^ q.w ^ pair[1]);
#else
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            uint32_t pairs[2][4];
#pragma unroll
            for (int run = 0; run < 2; ++run) {
                uint32_t twice = i < 2 ? low_twice(pair[run]) : high_twice(pair[run]);
                decode(word_of(words[run], i), pairs[run]);
#pragma unroll
                for (int j = 0; j < 4; ++j) pairs[run][j] = times(pairs[run][j], twice);
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const uint4& token = tokens[unit * 4 + i][n];
                multiply_add(sums[n], pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1], token.x,
                             token.y);
                multiply_add(sums[n], pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3], token.z,
                             token.w);
            }
        }
#endif
    }
}

template <int NT>
__device__ __forceinline__ void store_sums(uint32_t to, const float (&sums)[NT][4]) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        store_16(to + n * 512,
                 make_uint4(__float_as_uint(sums[n][0]), __float_as_uint(sums[n][1]),
                            __float_as_uint(sums[n][2]), __float_as_uint(sums[n][3])));
    }
}

__device__ __forceinline__ float rounded(float x) {
    return __bfloat162float(__float2bfloat16_rn(x));
}

// Neighbouring items of a group.
template <int NT>
struct Run {
    int group, expert;
    int slots[NT];  // of token lane / 4 of each eight; -1: none
};

// SwiGLU of 16 neighbouring values of fc2's input, quantised and recorded.
template <int NT>
__device__ __forceinline__ void finish_fc1(
    const Arguments& a, const Run<NT>& run, int row, int lane, float (&sums)[2][NT][4]) {
    int g = lane / 4, t = lane % 4;
    float factor = *a.input_global1 * a.globals1[run.expert] * (UNIT * UNIT);
    float global = *a.input_global2;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        uint32_t codes[2][2], words[2][2], bytes[2];
        int slots[2];
        float values[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            slots[i] = __shfl_sync(~0u, run.slots[n], (2 * t + i) * 4);
            float amax = 0.0f;
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                float gate = rounded(sums[m][n][i] * factor);
                float up = rounded(sums[m][n][2 + i] * factor);
                values[m][i] = rounded(rounded(gate / (1.0f + expf(-gate))) * up);
                amax = max_of(amax, fabsf(values[m][i]));
            }
#pragma unroll
            for (int step = 4; step < 32; step *= 2)
                amax = max_of(amax, __shfl_xor_sync(~0u, amax, step));
            float effective;
            bytes[i] = scale_byte(amax, global, effective);
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                codes[m][i] = code_of(values[m][i], effective);
                words[m][i] = codes[m][i] << (4 * g);
#pragma unroll
                for (int step = 4; step < 32; step *= 2)
                    words[m][i] |= __shfl_xor_sync(~0u, words[m][i], step);
            }
        }
        // Codes i and i + 4 of a word, which lanes of g = i and i + 4 have, make a pair: the lower
        // lane stores it for the first token, the upper one for the second.
        int which = g / 4, slot = which ? slots[1] : slots[0];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            uint32_t other = __shfl_xor_sync(~0u, which ? codes[m][0] : codes[m][1], 16);
            uint32_t pair = which ? operand_pair(other, codes[m][1], bytes[1])
                                  : operand_pair(codes[m][0], other, bytes[0]);
            if (slot >= 0) {
                auto* operands = reinterpret_cast<uint8_t*>(a.operands2 +
                                                            static_cast<int64_t>(slot) * a.width);
                *reinterpret_cast<uint32_t*>(operands + operand_offset(row + 8 * m) + g % 4 * 4) =
                    pair;
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (slots[i] < 0) continue;
            int64_t at = static_cast<int64_t>(slots[i]) * a.width + row;
            if (g < 2)
                *reinterpret_cast<uint32_t*>(a.input_codes2 + at / 2 + 4 * g) =
                    g ? words[1][i] : words[0][i];
            if (g == 2) a.input_scales2[at / 16] = static_cast<uint8_t>(bytes[i]);
            if (a.activations != nullptr) {
                a.activations[at + g] = __float2bfloat16_rn(values[0][i]);
                a.activations[at + 8 + g] = __float2bfloat16_rn(values[1][i]);
            }
        }
    }
    __threadfence();
    __syncwarp();
    if (lane == 0) {
        atomicAdd(a.counts + 2 + run.group, 1);
        atomicAdd(a.counts + 1, 1);
    }
}

template <int NT>
__device__ __forceinline__ void finish_fc2(
    const Arguments& a, const Run<NT>& run, int row, int lane, float (&sums)[2][NT][4]) {
    int g = lane / 4, t = lane % 4, which = g % 2;
    float factor = *a.input_global2 * a.globals2[run.expert] * (UNIT * UNIT);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        // Of two neighbouring rows, the even lane stores the first token, the odd one the second.
        int slot = __shfl_sync(~0u, run.slots[n], (2 * t + which) * 4);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float first = sums[m][n][2 * half] * factor;
                float second = sums[m][n][2 * half + 1] * factor;
                float other = __shfl_xor_sync(~0u, which ? first : second, 4);
                __nv_bfloat162 pair = which ? __floats2bfloat162_rn(other, second)
                                            : __floats2bfloat162_rn(first, other);
                if (slot >= 0) {
                    int64_t at = static_cast<int64_t>(slot) * a.hidden + row + half * 16 +
                                 m * 8 + g - which;
                    *reinterpret_cast<__nv_bfloat162*>(a.products + at) = pair;
                }
            }
        }
    }
}

// Until fc1 is done for a group.
__device__ __forceinline__ void await_fc1(
    const Arguments& a, int group, int lane, bool& all_done) {
    if (all_done) return;
    int seen = 0, total = a.counts[0] * (a.width / 16);
    if (lane == 0) {
        auto count = [](const int* from) {
            int value;
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
            return value;
        };
        seen = count(a.counts + 1);
        if (seen < total) {
            while (count(a.counts + 2 + group) < a.width / 16) __nanosleep(40);
        }
    }
    all_done = __shfl_sync(~0u, seen, 0) >= total;
    __syncwarp();
}

// What a team's warps know of one another, in shared memory: the sums of two items, each warp's
// part, and barriers: all parts are there; those who add them up have read them.
struct Team {
    uint32_t sums, barriers;

    __device__ __forceinline__ uint32_t place(int number, int warp) const {
        return sums + (number % SLOTS * TEAM + warp) * SUM_BYTES;
    }
    __device__ __forceinline__ uint32_t full(int number) const { return barriers + number % SLOTS * 16; }
    __device__ __forceinline__ uint32_t empty(int number) const { return full(number) + 8; }
};

__device__ __forceinline__ void barrier_init_of(uint32_t barrier, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count));
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Adds up the parts of an item and ends it, in the warps whose turn it is.
template <int NT>
__device__ __forceinline__ void finish(
    const Arguments& a, const Team& team, const Share& share, const Run<NT>& run, int part,
    int number, int row, int warp, int lane) {
    if (!share.adds_up(number)) return;
    barrier_wait(team.full(number), number / SLOTS % 2);
    float sums[2][NT][4] = {};
    for (int slice = 0; slice < share.slices; ++slice) {
        uint32_t from = team.place(number, warp - share.slice + slice) + lane * 16;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                uint4 four = load_16(from + (m * MAX_NT + n) * 512);
                sums[m][n][0] += __uint_as_float(four.x);
                sums[m][n][1] += __uint_as_float(four.y);
                sums[m][n][2] += __uint_as_float(four.z);
                sums[m][n][3] += __uint_as_float(four.w);
            }
        }
    }
    __syncwarp();
    if (lane == 0) arrive(team.empty(number));
    if (part == FC1) finish_fc1<NT>(a, run, row, lane, sums);
    else finish_fc2<NT>(a, run, row, lane, sums);
}

// Multiplies all neighbouring items of a group. `number` counts the items of the team.
template <int NT>
__device__ __forceinline__ void process(
    const Arguments& a, const Team& team, Loader& loader, Content& content, int& stage,
    int& number) {
    int lane = loader.lane, warp = loader.warp, part = content.part();
    int columns = part == FC1 ? a.hidden : a.width;
    Share share(columns, warp);
    Run<NT> run;
    run.group = content.group();
    run.expert = content.expert();
    uint4 tokens[WORDS][NT];
    const auto* operands = reinterpret_cast<const uint4*>(part == FC1 ? a.operands1 : a.operands2);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        int place = n * 8 + lane / 4;
        int slot = place < content.num_slots() ? a.order[content.first_slot() + place] : -1;
        run.slots[n] = slot;
        int64_t row = part == FC1 ? slot / (a.num_slots / a.num_tokens) : slot;
        const uint4* from = operands + row * (columns / 8) + share.slice * (CHUNK / 8) + lane % 4;
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
            tokens[word][n] = make_uint4(0, 0, 0, 0);
#if EXPERT_CEILING != 2
            if (slot >= 0) tokens[word][n] = from[word * 4];
#endif
        }
    }
    int row = 0;
    bool pending = false;
    do {
        await_copies();
        __syncwarp();
        uint32_t from = loader.ring + stage * STAGE_BYTES;
        uint32_t to = team.place(number, warp) + lane * 16;
        int row_before = row;
        row = content.row();
#if EXPERT_ROLLED
        barrier_wait(team.empty(number), (number / SLOTS + 1) % 2);
#pragma unroll 1
        for (int m = 0; m < 2; ++m) {
            float sums[NT][4];
            multiply<NT>(from, m, lane, tokens, sums);
            store_sums<NT>(to + m * MAX_NT * 512, sums);
        }
        __syncwarp();
        loader.load(a, stage);
#else
        float sums[2][NT][4];
        multiply<NT>(from, 0, lane, tokens, sums[0]);
        multiply<NT>(from, 1, lane, tokens, sums[1]);
        __syncwarp();
        loader.load(a, stage);
        barrier_wait(team.empty(number), (number / SLOTS + 1) % 2);
        store_sums<NT>(to, sums[0]);
        store_sums<NT>(to + MAX_NT * 512, sums[1]);
#endif
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        __syncwarp();
        if (lane == 0) {
            arrive(team.full(number));
            if (!share.adds_up(number)) arrive(team.empty(number));
        }
        // One item behind: by now the other warps have their parts ready.
        if (pending) finish<NT>(a, team, share, run, part, number - 1, row_before, warp, lane);
        pending = true;
        ++number;
        content = Content(loader.ring + stage * STAGE_BYTES);
    } while (content.part() == part && content.group() == run.group);
    finish<NT>(a, team, share, run, part, number - 1, row, warp, lane);
}

__global__ void __launch_bounds__(THREADS, 1) multiply_kernel(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) uint8_t shared[];
    int index = threadIdx.x / 32, team_index = index / TEAM;
    Loader loader;
    loader.lane = threadIdx.x % 32;
    loader.warp = index % TEAM;
    loader.ring = shared_address(shared) + index * STAGES * STAGE_BYTES;
    Team team;
    team.sums = shared_address(shared) + WARPS * STAGES * STAGE_BYTES +
                team_index * SLOTS * TEAM * SUM_BYTES;
    team.barriers = shared_address(shared) + WARPS * STAGES * STAGE_BYTES +
                    TEAMS * SLOTS * TEAM * SUM_BYTES + team_index * SLOTS * 16;
    if (threadIdx.x % (TEAM * 32) == 0) {
        for (int i = 0; i < 2 * SLOTS; ++i) barrier_init_of(team.barriers + 8 * i, TEAM);
    }
    __syncthreads();
    wait_for_previous();
    let_next_start();
    int num_groups = a.counts[0];
    int of_group1 = a.width / (16 * TEAM / (a.hidden / CHUNK));
    int of_group2 = a.hidden / (ROWS * TEAM / (a.width / CHUNK));
    loader.walk.team = static_cast<int>(blockIdx.x) * TEAMS + team_index;
    loader.walk.num_teams = static_cast<int>(gridDim.x) * TEAMS;
    loader.walk.num_items1 = num_groups * of_group1;
    loader.walk.num_items2 = num_groups * of_group2;
    loader.walk.of_group1 = of_group1;
    loader.walk.of_group2 = of_group2;
    loader.walk.open();
    for (int i = 0; i < STAGES; ++i) loader.load(a, i);
    __syncwarp();
    int stage = 0, number = 0;
    bool all_done = false;
    Content content(loader.ring);
    while (content.part() != NONE) {
        if (content.part() == FC2) await_fc1(a, content.group(), loader.lane, all_done);
        if (content.num_slots() <= 8) process<1>(a, team, loader, content, stage, number);
        else if constexpr (MAX_NT > 1) process<2>(a, team, loader, content, stage, number);
    }
}

__global__ void __launch_bounds__(COMBINE_THREADS)
    combine_kernel(const __grid_constant__ Arguments a) {
    wait_for_previous();
    int64_t index = static_cast<int64_t>(blockIdx.x) * COMBINE_THREADS + threadIdx.x;
    int eighths = a.hidden / 8, slots_of_token = a.num_slots / a.num_tokens;
    if (index >= static_cast<int64_t>(a.num_tokens) * eighths) return;
    int64_t token = index / eighths;
    int at = static_cast<int>(index % eighths);
    float sums[8] = {};
#pragma unroll 8
    for (int i = 0; i < slots_of_token; ++i) {
        int64_t slot = token * slots_of_token + i;
        if (!is_routed(a, a.experts[slot])) continue;
        float probability = a.probabilities[slot];
        uint4 four = reinterpret_cast<const uint4*>(a.products + slot * a.hidden)[at];
        const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&four);
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float2 two = __bfloat1622float2(pairs[j]);
            sums[2 * j] += probability * two.x;
            sums[2 * j + 1] += probability * two.y;
        }
    }
    uint4 result;
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(&result);
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = __floats2bfloat162_rn(sums[2 * j], sums[2 * j + 1]);
    reinterpret_cast<uint4*>(a.output + token * a.hidden)[at] = result;
}

// Starts while the kernel before it runs, and waits for it inside.
cudaError_t launch_after(
    void (*kernel)(Arguments), const Arguments& a, int64_t blocks, int threads, int shared_bytes,
    cudaStream_t stream) {
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(static_cast<unsigned>(blocks));
    config.blockDim = dim3(threads);
    config.dynamicSmemBytes = shared_bytes;
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, kernel, a);
}

// Whether a team's warps share both products evenly.
bool has_kernel(int hidden, int width) {
    if (hidden % CHUNK || width % CHUNK) return false;
    int slices1 = hidden / CHUNK, slices2 = width / CHUNK;
    if (slices1 > TEAM || slices2 > TEAM || TEAM % slices1 || TEAM % slices2) return false;
    return width % (16 * TEAM / slices1) == 0 && hidden % (ROWS * TEAM / slices2) == 0;
}

int64_t blocks_for(int64_t threads, int of_block) { return (threads + of_block - 1) / of_block; }

}  // namespace

extern "C" {

// Starts the three kernels; gives a cudaError_t, or -1 for sizes without kernel.
int trace_routed_experts(
    const void* codes1, const void* scales1, const void* globals1, const void* codes2,
    const void* scales2, const void* globals2, const void* input_global1,
    const void* input_global2, const void* x, const void* experts, const void* probabilities,
    void* output, void* input_codes1, void* input_scales1, void* input_codes2, void* input_scales2,
    void* activations, void* operands1, void* operands2, void* products, void* order, void* groups,
    void* counts, int num_tokens, int slots_of_token, int num_experts, int hidden, int width,
    int num_blocks, void* stream) {
    if (!has_kernel(hidden, width) || num_experts > MAX_EXPERTS) return -1;
    Arguments a{static_cast<const uint8_t*>(codes1),
                static_cast<const uint8_t*>(scales1),
                static_cast<const float*>(globals1),
                static_cast<const uint8_t*>(codes2),
                static_cast<const uint8_t*>(scales2),
                static_cast<const float*>(globals2),
                static_cast<const float*>(input_global1),
                static_cast<const float*>(input_global2),
                static_cast<const __nv_bfloat16*>(x),
                static_cast<const int64_t*>(experts),
                static_cast<const float*>(probabilities),
                static_cast<__nv_bfloat16*>(output),
                static_cast<uint8_t*>(input_codes1),
                static_cast<uint8_t*>(input_scales1),
                static_cast<uint8_t*>(input_codes2),
                static_cast<uint8_t*>(input_scales2),
                static_cast<__nv_bfloat16*>(activations),
                static_cast<__half*>(operands1),
                static_cast<__half*>(operands2),
                static_cast<__nv_bfloat16*>(products),
                static_cast<int*>(order),
                static_cast<int4*>(groups),
                static_cast<int*>(counts),
                num_tokens, num_tokens * slots_of_token, num_experts, hidden, width};
    auto on = static_cast<cudaStream_t>(stream);
    int64_t values = static_cast<int64_t>(num_tokens) * hidden;
    int64_t prepare_blocks = 1 + blocks_for(values / 16, PREPARE_THREADS);
    cudaError_t error =
        launch_after(prepare_kernel, a, prepare_blocks, PREPARE_THREADS, 0, on);
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(multiply_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 SHARED_BYTES);
    if (error != cudaSuccess) return error;
    error = launch_after(multiply_kernel, a, num_blocks, THREADS, SHARED_BYTES, on);
    if (error != cudaSuccess) return error;
    return launch_after(combine_kernel, a, blocks_for(values / 8, COMBINE_THREADS),
                        COMBINE_THREADS, 0, on);
}

}  // extern "C"
