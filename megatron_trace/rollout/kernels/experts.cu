// Routed experts of a layer in NVFP4, for steps of few tokens: weights are read once.
//
// Legend: T tokens, k slots of a token, S = T k slots, E experts, H hidden size, F intermediate
// size of an expert. Weights are as ModelOpt stores them: fc1 [E, 2 F, H], gate above up, and fc2
// [E, H, F], two codes in a byte, an E4M3 scale for 16 columns, an FP32 global scale per expert.
//
// Three kernels, none of which needs the host:
// * `prepare`: one block sorts the slots by expert and cuts the slots of an expert into groups of
//   at most 32; the others quantise the tokens.
// * `multiply`: persistent. An item of fc1 is 16 gate rows and 16 up rows times a group of slots,
//   all of H; SwiGLU, which it ends with, gives one block of 16 values of fc2's input, quantised at
//   once. An item of fc2 is 32 rows times a group, all of F; it waits until the group's items of
//   fc1 are done, which are handed out long before. A warp has its own items and its own ring in
//   shared memory, which is filled ahead over the ends of items; warps never wait for one another
//   but for these counts.
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

#ifndef EXPERT_WARPS
#define EXPERT_WARPS 12
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

constexpr int WARPS = EXPERT_WARPS;
constexpr int THREADS = WARPS * 32;
constexpr int GROUP_SLOTS = 32;
constexpr int MAX_EXPERTS = 1024;
constexpr int CHUNK = 256;                    // columns of a stage
constexpr int ROWS = 32;                      // of an item: two runs of 16
constexpr int STAGES = 3;                     // of codes; two chunks are under way
constexpr int CODE_BYTES = ROWS * CHUNK / 2;
constexpr int SCALE_BYTES = ROWS * 2 * CHUNK / 16;  // of two chunks: whole sectors
constexpr int RING_BYTES = STAGES * CODE_BYTES + 2 * SCALE_BYTES;
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
    let_next_start();
    if (blockIdx.x == 0) {
        sort_slots(a);
        return;
    }
    int64_t block = static_cast<int64_t>(blockIdx.x - 1) * PREPARE_THREADS + threadIdx.x;
    if (block < static_cast<int64_t>(a.num_tokens) * (a.hidden / 16)) quantise_block(a, block);
}

enum class Part { FC1, FC2, NONE };

// What a warp does, step by step: items of fc1, then those of fc2. Full rounds of all warps give
// neighbouring items to the warps of a block, which then read the same tokens; the last rounds
// spread over the blocks. Warps that get none of fc1's last round take as much of fc2.
struct Schedule {
    int near, spread, num_warps, num_items1, num_items2, ratio;

    __device__ __forceinline__ Part item(int step, int& index) const {
        int full = num_items1 / num_warps, rest = num_items1 % num_warps;
        if (step < full) {
            index = step * num_warps + near;
            return Part::FC1;
        }
        step -= full;
        int first = 0;
        if (rest > 0) {
            if (spread < rest) {
                index = full * num_warps + spread;
                if (step == 0) return Part::FC1;
                step -= 1;
            } else {
                index = step * (num_warps - rest) + spread - rest;
                if (step < ratio) return index < num_items2 ? Part::FC2 : Part::NONE;
                step -= ratio;
            }
            first = ratio * (num_warps - rest);
        }
        int left = max(0, num_items2 - first);
        index = first + step * num_warps + (step < left / num_warps ? near : spread);
        return step <= left / num_warps && index < num_items2 ? Part::FC2 : Part::NONE;
    }
};

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

__device__ __forceinline__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all copies but those since the last `end_copies` but one are there.
__device__ __forceinline__ void await_copies() {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
}

// Fills a warp's ring, chunk by chunk, item by item.
struct Loader {
    Schedule schedule;
    uint32_t ring;
    int lane, step = 0, stage = 0, scale_stage = 1;
    // The item that is being filled in.
    Part part = Part::NONE;
    int chunk = 0, num_chunks = 0, row = 0, row_bytes = 0;
    int group = 0, expert = 0, num_slots = 0;
    int slots[GROUP_SLOTS / 8];  // of token lane / 4 of each eight; -1: none
    const uint8_t* codes = nullptr;
    const uint8_t* scales = nullptr;
    int run_rows = 0;
    // The item after it.
    Part next_part = Part::NONE;
    int next_group = 0, next_row = 0;
    int4 next_info;

    __device__ __forceinline__ void look_ahead(const Arguments& a) {
        int index;
        next_part = schedule.item(step++, index);
        if (next_part == Part::NONE) return;
        int each = next_part == Part::FC1 ? a.width / 16 : a.hidden / ROWS;
        next_group = index / each;
        next_row = index % each * (next_part == Part::FC1 ? 16 : ROWS);
        next_info = a.groups[next_group];
    }

    __device__ __forceinline__ void advance(const Arguments& a) {
        part = next_part;
        chunk = 0;
        if (part == Part::NONE) {
            num_chunks = 0;
            return;
        }
        group = next_group;
        row = next_row;
        expert = next_info.x;
        num_slots = next_info.z;
#pragma unroll
        for (int n = 0; n < GROUP_SLOTS / 8; ++n) {
            int place = n * 8 + lane / 4;
            slots[n] = place < num_slots ? a.order[next_info.y + place] : -1;
        }
        bool first = part == Part::FC1;
        int columns = first ? a.hidden : a.width;
        int64_t at = static_cast<int64_t>(expert) * (first ? 2 * a.width : a.hidden) + row;
        run_rows = first ? a.width : 16;
        row_bytes = columns / 2;
        num_chunks = columns / CHUNK;
        codes = (first ? a.codes1 : a.codes2) + (at + lane / 8) * row_bytes + lane % 8 * 16;
        scales = (first ? a.scales1 : a.scales2) + (at + lane / 2) * (row_bytes / 8) +
                 lane % 2 * 16;
        look_ahead(a);
    }

    __device__ __forceinline__ void load(const Arguments& a) {
        if (chunk == num_chunks) advance(a);
        if (part != Part::NONE) {
            uint32_t to = ring + stage * CODE_BYTES + lane / 8 * 128 +
                          ((lane % 8) ^ (lane / 8 % 2)) * 16;
            const uint8_t* from = codes + chunk * (CHUNK / 2);
            const uint8_t* second = from + run_rows * row_bytes;
#pragma unroll
            for (int i = 0; i < 4; ++i) copy_16(to + i * 512, from + i * 4 * row_bytes);
#pragma unroll
            for (int i = 0; i < 4; ++i) copy_16(to + 2048 + i * 512, second + i * 4 * row_bytes);
            stage = stage == STAGES - 1 ? 0 : stage + 1;
            if (chunk % 2 == 0) {
                scale_stage ^= 1;
                uint32_t at = ring + STAGES * CODE_BYTES + scale_stage * SCALE_BYTES +
                              lane / 2 * 32 + ((lane % 2) ^ (lane / 8 % 2)) * 16;
                const uint8_t* first = scales + chunk * (CHUNK / 16);
                copy_16(at, first);
                copy_16(at + 512, first + run_rows * (row_bytes / 8));
            }
            ++chunk;
        }
        end_copies();
    }
};

// The item that a warp multiplies.
struct Item {
    Part part;
    int num_chunks, row, group, expert, num_slots;
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

__device__ __forceinline__ uint32_t word_of(const uint4& four, int i) {
    return i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
}

// Where the operands of a lane's tokens are.
template <int NT>
struct Tokens {
    const uint4* base;
    uint32_t offsets[NT];  // in 16 bytes
    bool valid[NT];

    // Zeros where there is no token, or unless `wanted`.
    __device__ __forceinline__ uint4 load(int n, int chunk, int word, bool wanted = true) const {
        uint4 r = make_uint4(0, 0, 0, 0);
#if EXPERT_CEILING != 2
        asm volatile(
            "{\n.reg .pred wanted;\nsetp.ne.b32 wanted, %5, 0;\n"
            "@wanted ld.global.v4.u32 {%0, %1, %2, %3}, [%4];\n}"
            : "+r"(r.x), "+r"(r.y), "+r"(r.z), "+r"(r.w)
            : "l"(base + offsets[n] + chunk * (CHUNK / 8) + word * 4),
              "r"(static_cast<int>(valid[n] && wanted)));
#endif
        return r;
    }
};

// sums += weights of an item times its tokens. Sums are in units of 2^-28.
template <int NT>
__device__ __forceinline__ void multiply(
    const Arguments& a, const Item& item, const Tokens<NT>& tokens, Loader& loader, int& stage,
    int& scale_stage, float (&sums)[2][NT][4]) {
    // Operands of the next chunk take the place of those just used, where registers allow.
    constexpr bool AHEAD = NT <= 2;
    constexpr int WORDS = CHUNK / 32;
    int lane = loader.lane, g = lane / 4, t = lane % 4;
    uint4 operands[AHEAD ? WORDS : 1][NT];
    if constexpr (AHEAD) {
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
#pragma unroll
            for (int n = 0; n < NT; ++n) operands[word][n] = tokens.load(n, 0, word);
        }
    }
#pragma unroll 1
    for (int chunk = 0; chunk < item.num_chunks; ++chunk) {
        await_copies();
        __syncwarp();
        loader.load(a);
        uint32_t codes = loader.ring + stage * CODE_BYTES + g * 128;
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        if (chunk % 2 == 0) scale_stage ^= 1;
        uint32_t scales = loader.ring + STAGES * CODE_BYTES + scale_stage * SCALE_BYTES + g * 32 +
                          ((chunk % 2) ^ (g / 4)) * 16 + t * 4;
        uint32_t bytes[2][2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int run = 0; run < 2; ++run)
                bytes[m][run] = load_4(scales + (run * 16 + m * 8) * 32);
        }
#pragma unroll
        for (int unit = 0; unit < 2; ++unit) {
            uint4 words[2][2];
            uint32_t pair[2][2];
#pragma unroll
            for (int m = 0; m < 2; ++m) {
#pragma unroll
                for (int run = 0; run < 2; ++run) {
                    words[m][run] = load_16(codes + (run * 16 + m * 8) * 128 +
                                            ((2 * t + unit) ^ (g % 2)) * 16);
                    pair[m][run] = scales_of(bytes[m][run] >> (16 * unit));
                }
            }
#if EXPERT_CEILING == 1
#pragma unroll
            for (int m = 0; m < 2; ++m) {
                uint4 p = words[m][0], q = words[m][1];
                sums[m][0][unit] += __uint_as_float(p.x ^ p.y ^ p.z ^ p.w ^ pair[m][0]);
                sums[m][0][2 + unit] += __uint_as_float(q.x ^ q.y ^ q.z ^ q.w ^ pair[m][1]);
            }
#else
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                constexpr int ZERO = 0;
                int word = unit * 4 + i;
                uint4 current[NT];
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    current[n] = AHEAD ? operands[AHEAD ? word : ZERO][n]
                                       : tokens.load(n, chunk, word);
                }
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    uint32_t pairs[2][4];
#pragma unroll
                    for (int run = 0; run < 2; ++run) {
                        uint32_t twice =
                            i < 2 ? low_twice(pair[m][run]) : high_twice(pair[m][run]);
                        decode(word_of(words[m][run], i), pairs[run]);
#pragma unroll
                        for (int j = 0; j < 4; ++j) pairs[run][j] = times(pairs[run][j], twice);
                    }
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        multiply_add(sums[m][n], pairs[0][0], pairs[1][0], pairs[0][1],
                                     pairs[1][1], current[n].x, current[n].y);
                        multiply_add(sums[m][n], pairs[0][2], pairs[1][2], pairs[0][3],
                                     pairs[1][3], current[n].z, current[n].w);
                    }
                }
                if constexpr (AHEAD) {
#pragma unroll
                    for (int n = 0; n < NT; ++n) {
                        operands[word][n] =
                            tokens.load(n, chunk + 1, word, chunk + 1 < item.num_chunks);
                    }
                }
            }
#endif
        }
    }
}

__device__ __forceinline__ float rounded(float x) {
    return __bfloat162float(__float2bfloat16_rn(x));
}

// SwiGLU of 16 neighbouring values of fc2's input, quantised and recorded.
template <int NT>
__device__ __forceinline__ void finish_fc1(
    const Arguments& a, const Item& item, int lane, float (&sums)[2][NT][4]) {
    int g = lane / 4, t = lane % 4;
    float factor = *a.input_global1 * a.globals1[item.expert] * (UNIT * UNIT);
    float global = *a.input_global2;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        uint32_t codes[2][2], words[2][2], bytes[2];
        int slots[2];
        float values[2][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            slots[i] = __shfl_sync(~0u, item.slots[n], (2 * t + i) * 4);
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
                auto* row = reinterpret_cast<uint8_t*>(a.operands2 +
                                                       static_cast<int64_t>(slot) * a.width);
                *reinterpret_cast<uint32_t*>(row + operand_offset(item.row + 8 * m) + g % 4 * 4) =
                    pair;
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (slots[i] < 0) continue;
            int64_t at = static_cast<int64_t>(slots[i]) * a.width + item.row;
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
        atomicAdd(a.counts + 2 + item.group, 1);
        atomicAdd(a.counts + 1, 1);
    }
}

template <int NT>
__device__ __forceinline__ void finish_fc2(
    const Arguments& a, const Item& item, int lane, float (&sums)[2][NT][4]) {
    int g = lane / 4, t = lane % 4, which = g % 2;
    float factor = *a.input_global2 * a.globals2[item.expert] * (UNIT * UNIT);
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        // Of two neighbouring rows, the even lane stores the first token, the odd one the second.
        int slot = __shfl_sync(~0u, item.slots[n], (2 * t + which) * 4);
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int run = 0; run < 2; ++run) {
                float first = sums[m][n][2 * run] * factor;
                float second = sums[m][n][2 * run + 1] * factor;
                float other = __shfl_xor_sync(~0u, which ? first : second, 4);
                __nv_bfloat162 pair = which ? __floats2bfloat162_rn(other, second)
                                            : __floats2bfloat162_rn(first, other);
                if (slot >= 0) {
                    int64_t at = static_cast<int64_t>(slot) * a.hidden + item.row + run * 16 +
                                 m * 8 + g - which;
                    *reinterpret_cast<__nv_bfloat162*>(a.products + at) = pair;
                }
            }
        }
    }
}

// Until fc1 is done for the slots of an item.
__device__ __forceinline__ void await_fc1(
    const Arguments& a, const Item& item, int lane, int num_items1, bool& all_done) {
    if (all_done) return;
    int seen = 0;
    if (lane == 0) {
        auto count = [](const int* from) {
            int value;
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
            return value;
        };
        seen = count(a.counts + 1);
        if (seen < num_items1) {
            while (count(a.counts + 2 + item.group) < a.width / 16) __nanosleep(40);
        }
    }
    all_done = __shfl_sync(~0u, seen, 0) >= num_items1;
    __syncwarp();
}

template <int NT>
__device__ __forceinline__ void process(
    const Arguments& a, const Item& item, Loader& loader, int& stage, int& scale_stage) {
    bool first = item.part == Part::FC1;
    int columns = first ? a.hidden : a.width;
    int slots_of_token = a.num_slots / a.num_tokens;
    Tokens<NT> tokens;
    tokens.base = reinterpret_cast<const uint4*>(first ? a.operands1 : a.operands2);
    float sums[2][NT][4];
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        int slot = item.slots[n];
        tokens.valid[n] = slot >= 0;
        int row = first ? slot / slots_of_token : slot;
        tokens.offsets[n] = static_cast<uint32_t>(row) * (columns / 8) + loader.lane % 4;
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
        }
    }
    multiply<NT>(a, item, tokens, loader, stage, scale_stage, sums);
    if (first) finish_fc1<NT>(a, item, loader.lane, sums);
    else finish_fc2<NT>(a, item, loader.lane, sums);
}

__global__ void __launch_bounds__(THREADS, 1) multiply_kernel(const __grid_constant__ Arguments a) {
    extern __shared__ __align__(128) uint8_t shared[];
    int warp = threadIdx.x / 32;
    Loader loader;
    loader.lane = threadIdx.x % 32;
    loader.ring = shared_address(shared) + warp * RING_BYTES;
    wait_for_previous();
    let_next_start();
    int num_groups = a.counts[0];
    int num_items1 = num_groups * (a.width / 16);
    loader.schedule = {static_cast<int>(blockIdx.x) * WARPS + warp,
                       warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x),
                       static_cast<int>(gridDim.x) * WARPS,
                       num_items1,
                       num_groups * (a.hidden / ROWS),
                       max(1, a.hidden / a.width)};
    loader.look_ahead(a);
    loader.load(a);
    loader.load(a);
    int stage = 0, scale_stage = 1;
    bool all_done = false;
    while (loader.part != Part::NONE) {
        Item item{loader.part, loader.num_chunks, loader.row, loader.group, loader.expert,
                  loader.num_slots};
#pragma unroll
        for (int n = 0; n < GROUP_SLOTS / 8; ++n) item.slots[n] = loader.slots[n];
        if (item.part == Part::FC2) await_fc1(a, item, loader.lane, num_items1, all_done);
        if (item.num_slots <= 8) process<1>(a, item, loader, stage, scale_stage);
        else if (item.num_slots <= 16) process<2>(a, item, loader, stage, scale_stage);
        else process<4>(a, item, loader, stage, scale_stage);
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
    if (hidden % (2 * CHUNK) || width % (2 * CHUNK) || num_experts > MAX_EXPERTS) return -1;
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
    prepare_kernel<<<static_cast<unsigned>(prepare_blocks), PREPARE_THREADS, 0, on>>>(a);
    cudaError_t error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    constexpr int SHARED_BYTES = WARPS * RING_BYTES;
    error = cudaFuncSetAttribute(multiply_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 SHARED_BYTES);
    if (error != cudaSuccess) return error;
    error = launch_after(multiply_kernel, a, num_blocks, THREADS, SHARED_BYTES, on);
    if (error != cudaSuccess) return error;
    return launch_after(combine_kernel, a, blocks_for(values / 8, COMBINE_THREADS),
                        COMBINE_THREADS, 0, on);
}

}  // extern "C"
