// Routed experts of a layer in NVFP4, for steps of few tokens: weights are read once.
//
// Legend: T tokens, k slots of a token, S = T k slots, E experts, H hidden size, F intermediate
// size of an expert. Weights are as ModelOpt stores them: fc1 [E, 2 F, H], gate above up, and fc2
// [E, H, F], two codes in a byte, an E4M3 scale for 16 columns, an FP32 global scale per expert.
//
// Three kernels, none of which needs the host:
// * `prepare`: one block sorts the slots by expert and cuts the slots of an expert into groups of
//   at most 16; the others quantise the tokens.
// * `multiply`: persistent. An item of fc1 is 16 gate rows and 16 up rows times a group of slots,
//   all of H; SwiGLU, which it ends with, gives one block of 16 values of fc2's input, quantised at
//   once. An item of fc2 is 32 rows times a group, all of F; it waits until the group's items of
//   fc1 are done, which are handed out long before. A warp has its own items and its own ring in
//   shared memory, which the copy engine fills ahead over the ends of items; warps never wait for
//   one another but for these counts.
// * `combine`: adds up the slots of a token in their order, weighted by probability.
//
// `multiply` is bound by what its warps issue and wait for, not by memory: three warps of a
// scheduler share its time. So nothing may be spilled, the copy engine computes the addresses, and
// the program is short enough for the instruction cache.
//
// Weight rows are the rows of an MMA and tokens its columns. Thread t of 4 holds 64 neighbouring
// columns out of 256, as they are stored. Operands of tokens lie in memory as FP16 in that order:
// 16 bytes are a word of eight codes as `decode` gives them, words of the four threads stand side
// by side. Which column of an MMA a slot takes changes no bit of its result.
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include "fp4.cuh"

#ifndef EXPERT_WARPS
#define EXPERT_WARPS 12
#endif
// Bytes that the L2 cache fetches where a copy misses: 0 (what is asked for), 128 or 256.
#ifndef EXPERT_FETCH
#define EXPERT_FETCH 0
#endif
// What a build leaves out, to measure the rest: 1 decodes nothing, 2 loads no tokens.
#ifndef EXPERT_CEILING
#define EXPERT_CEILING 0
#endif

namespace {

constexpr int WARPS = EXPERT_WARPS;
constexpr int THREADS = WARPS * 32;
constexpr int GROUP_SLOTS = 16;
constexpr int MAX_EXPERTS = 1024;
constexpr int CHUNK = 256;                    // columns of a stage
constexpr int ROWS = 32;                      // of an item: two runs of 16
constexpr int STAGES = 3;                     // of codes; two are under way, no item has fewer
constexpr int CODE_BYTES = ROWS * CHUNK / 2;
constexpr int SCALE_BYTES = ROWS * 2 * CHUNK / 16;  // of two chunks: whole sectors
constexpr int RING_BYTES = STAGES * CODE_BYTES + 2 * SCALE_BYTES;
constexpr int SHARED_BYTES = WARPS * (RING_BYTES + STAGES * 8);
constexpr int FREE_ROUNDS = 4;                // of fc2, whose items are not dealt out
constexpr int PREPARE_THREADS = 1024;
constexpr int MAX_SLOTS = 16 * PREPARE_THREADS;
constexpr int COMBINE_THREADS = 256;
constexpr int COMBINE_SLOTS = 8;

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
    int* counts;                   // groups; items of fc1 done; of fc2 taken; of fc1 done by group
    int num_tokens, num_slots, num_experts, hidden, width;
    float tokens_of_slot;          // 1 / k
    int items1, items2;            // of a group
    uint32_t inverse1, inverse2;   // 2^32 over these, rounded up
};

__device__ __forceinline__ void wait_for_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

// Whether a lane is the one of its warp that does what one lane is to do.
__device__ __forceinline__ bool is_elected() {
    uint32_t elected;
    asm volatile(
        "{\n.reg .pred elected;\nelect.sync _|elected, -1;\nselp.b32 %0, 1, 0, elected;\n}"
        : "=r"(elected));
    return elected;
}

// Makes what `barrier_init` did known to the copy engine.
__device__ __forceinline__ void fence_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void let_next_start() {
    asm volatile("griddepcontrol.launch_dependents;");
}

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
    __shared__ int sizes[MAX_EXPERTS], starts[MAX_EXPERTS];
    __shared__ int64_t warp_sums[PREPARE_THREADS / 32];
    int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
    sizes[thread] = 0;
    __syncthreads();
    // Of each of the thread's slots the expert and, in the low half, its rank in it; -1: none.
    int places[MAX_SLOTS / PREPARE_THREADS];
#pragma unroll
    for (int i = 0; i < MAX_SLOTS / PREPARE_THREADS; ++i) {
        if (i * PREPARE_THREADS >= a.num_slots) break;
        int slot = i * PREPARE_THREADS + thread;
        int64_t expert = slot < a.num_slots ? a.experts[slot] : -1;
        places[i] = -1;
        if (is_routed(a, expert)) {
            int own = static_cast<int>(expert);
            places[i] = own << 16 | atomicAdd(&sizes[own], 1);
        }
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
    for (int i = 0; i < min(warp, (a.num_experts + 31) / 32); ++i) inclusive += warp_sums[i];
    int64_t before = inclusive - own;
    int first = static_cast<int>(before >> 32), start = static_cast<int>(before);
    starts[thread] = start;
    if (thread == PREPARE_THREADS - 1) {
        a.counts[0] = static_cast<int>(inclusive >> 32);
        a.counts[1] = a.counts[2] = 0;
    }
    if (num_groups > 0) {
        int each = ((size + num_groups - 1) / num_groups + 7) / 8 * 8;
        for (int i = 0; i < num_groups; ++i) {
            int slots = max(0, min(each, size - i * each));
            a.groups[first + i] = make_int4(thread, start + i * each, slots, 0);
            a.counts[3 + first + i] = 0;
        }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MAX_SLOTS / PREPARE_THREADS; ++i) {
        if (i * PREPARE_THREADS >= a.num_slots) break;
        if (places[i] >= 0)
            a.order[starts[places[i] >> 16] + (places[i] & 0xFFFF)] = i * PREPARE_THREADS + thread;
    }
}

// Quantises eight neighbouring values of a token, half a block; the lane beside has the other half.
__device__ __forceinline__ void quantise_eighth(const Arguments& a, int index) {
    uint4 eight = reinterpret_cast<const uint4*>(a.x)[index];
    float values[8];
    const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&eight);
    float amax = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float2 two = __bfloat1622float2(pairs[i]);
        values[2 * i] = two.x;
        values[2 * i + 1] = two.y;
        amax = max_of(amax, max_of(fabsf(two.x), fabsf(two.y)));
    }
    amax = max_of(amax, __shfl_xor_sync(~0u, amax, 1));
    float effective;
    uint32_t byte = block_scale(amax, *a.input_global1, effective), word = 0;
    Divisor divisor(effective);
#pragma unroll
    for (int i = 0; i < 8; ++i) word |= divisor.code_of(values[i]) << (4 * i);
    if (effective == 0.0f) word = 0;
    int token = index / (a.hidden / 8), column = index % (a.hidden / 8) * 8;
    auto* operands =
        reinterpret_cast<uint8_t*>(a.operands1 + static_cast<int64_t>(token) * a.hidden);
    *reinterpret_cast<uint4*>(operands + operand_offset(column)) = scaled_operands(word, byte);
    reinterpret_cast<uint32_t*>(a.input_codes1)[index] = word;
    if (index % 2 == 0) a.input_scales1[index / 2] = static_cast<uint8_t>(byte);
}

__global__ void __launch_bounds__(PREPARE_THREADS)
    prepare_kernel(const __grid_constant__ Arguments a) {
    wait_for_previous();
    let_next_start();
    if (blockIdx.x == 0) {
        sort_slots(a);
        return;
    }
    // Neighbouring warps lie in different blocks: few tokens spread over the multiprocessors.
    int warp = static_cast<int>(threadIdx.x / 32 * (gridDim.x - 1) + blockIdx.x - 1);
    int step = static_cast<int>((gridDim.x - 1) * PREPARE_THREADS);
    int num_eighths = a.num_tokens * (a.hidden / 8);
    for (int i = warp * 32 + static_cast<int>(threadIdx.x) % 32; i < num_eighths; i += step)
        quantise_eighth(a, i);
}

enum class Part { FC1, FC2, NONE };

// Which items there are. Those of fc1 are dealt out beforehand: full rounds of all warps give
// neighbouring items to the warps of a block, which then read the same tokens, and the last round
// spreads over the blocks. So are those of fc2, first to those who are not in fc1's last round; in
// its last rounds whoever is free takes the next one, since items differ in the slots they have.
struct Schedule {
    int num_groups;

    __device__ __forceinline__ int num_warps() const {
        return static_cast<int>(gridDim.x) * WARPS;
    }

    // The item of fc1 of a round, or -1.
    __device__ __forceinline__ int dealt(const Arguments& a, int round) const {
        int num_items = num_groups * a.items1;
        int warp = static_cast<int>(threadIdx.x) / 32, block = static_cast<int>(blockIdx.x);
        bool full = (round + 1) * num_warps() <= num_items;
        int index = round * num_warps() + (full ? block * WARPS + warp
                                                : warp * static_cast<int>(gridDim.x) + block);
        return index < num_items ? index : -1;
    }

    __device__ __forceinline__ int first_of_fc2(const Arguments& a) const {
        int warp = static_cast<int>(threadIdx.x) / 32;
        int rest = num_groups * a.items1 % num_warps();
        int place = warp * static_cast<int>(gridDim.x) + static_cast<int>(blockIdx.x) - rest;
        return place < 0 ? place + num_warps() : place;
    }
};

// Weights as the copy engine sees them.
struct Maps {
    CUtensorMap codes1, scales1, codes2, scales2;
};

__device__ __forceinline__ void fetch_map(const CUtensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Copies a box from global to shared memory; `barrier` counts the bytes.
__device__ __forceinline__ void copy_box(
    uint32_t to, const CUtensorMap& map, int column, int row, int depth, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
        "l"(&map), "r"(column), "r"(row), "r"(depth), "r"(barrier)
        : "memory");
}

// `atomicAdd` of 1 by one lane, whose result is not waited for until it is used: of additions the
// compiler would make one for the warp, and hand its result around at once.
__device__ __forceinline__ int taken_before(int* count) {
    int before;
    asm volatile("atom.relaxed.gpu.global.inc.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(count), "r"(0x7FFFFFFF)
                 : "memory");
    return before;
}

// Adds 1 after all that the warp wrote.
__device__ __forceinline__ void add_released(int* count) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(count) : "memory");
}

// What comes after sees what was written before the additions.
__device__ __forceinline__ int load_acquired(const int* count) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(count) : "memory");
    return value;
}

// Fills a warp's ring, stage by stage, item by item.
struct Loader {
    Schedule schedule;
    uint32_t ring, barriers;
    int lane, first_of_fc2, stage = 0, scale_stage = 1;
    // The item that is being filled in.
    Part part = Part::NONE;
    int position = 0, num_stages = 0, row = 0, group = 0, expert = 0, num_slots = 0;
    float global = 0.0f;
    int slots[GROUP_SLOTS / 8];  // of token lane / 4 of each eight; -1: none
    // The item after it. Of its group, lanes 0 to 2 have the three numbers.
    Part next_part = Part::NONE;
    int next_row = 0, next_group = 0, next_info = 0;
    // Rounds of fc1 that were dealt, and the item of the round after them, or -1.
    int num_rounds = 0, dealt = -1;
    // In lane 0, once nothing of fc1 is left: the item of fc2 after the next one. Rounds of fc2
    // that the warp has taken, and those that are dealt out.
    int ticket = -1, fc2_round = 0, dealt_rounds;

    __device__ __forceinline__ void start(const Arguments& a) {
        dealt = schedule.dealt(a, 0);
        if (dealt < 0) take_ticket(a);
        look_ahead(a);
    }

    __device__ __forceinline__ void take_ticket(const Arguments& a) {
        if (fc2_round < dealt_rounds)
            ticket = fc2_round == 0 ? first_of_fc2
                                    : fc2_round * schedule.num_warps() +
                                          static_cast<int>(blockIdx.x) * WARPS +
                                          static_cast<int>(threadIdx.x) / 32;
        else if (lane == 0)
            ticket = dealt_rounds * schedule.num_warps() + taken_before(a.counts + 2);
        ++fc2_round;
    }

    __device__ __forceinline__ void look_ahead(const Arguments& a) {
        bool first = dealt >= 0;
        int index = dealt;
        if (first) {
            dealt = schedule.dealt(a, ++num_rounds);
        } else {
            index = __shfl_sync(~0u, ticket, 0);
            if (index >= schedule.num_groups * a.items2) {
                next_part = Part::NONE;
                return;
            }
        }
        next_part = first ? Part::FC1 : Part::FC2;
        next_group = static_cast<int>(__umulhi(index, first ? a.inverse1 : a.inverse2));
        next_row = (index - next_group * (first ? a.items1 : a.items2)) * (first ? ROWS / 2 : ROWS);
        if (lane < 3) next_info = reinterpret_cast<const int*>(a.groups + next_group)[lane];
    }

    __device__ __forceinline__ void advance(const Arguments& a) {
        part = next_part;
        position = num_stages = 0;
        if (part == Part::NONE) return;
        bool first = part == Part::FC1;
        num_stages = static_cast<uint32_t>(first ? a.hidden : a.width) / CHUNK;
        group = next_group;
        row = next_row;
        expert = __shfl_sync(~0u, next_info, 0);
        global = (first ? a.globals1 : a.globals2)[expert];
        int first_place = __shfl_sync(~0u, next_info, 1);
        num_slots = __shfl_sync(~0u, next_info, 2);
#pragma unroll
        for (int n = 0; n < GROUP_SLOTS / 8; ++n) {
            int place = n * 8 + lane / 4;
            slots[n] = place < num_slots ? a.order[first_place + place] : -1;
        }
        if (dealt < 0) take_ticket(a);
    }

    __device__ __forceinline__ void load(const Arguments& a, const Maps& maps) {
        if (position == num_stages) advance(a);
        if (part == Part::NONE) return;
        bool with_scales = position % 2 == 0;
        if (with_scales) scale_stage ^= 1;
        if (is_elected()) {
            bool first = part == Part::FC1;
            int depth = first ? 2 * expert : expert;
            uint32_t barrier = barriers + stage * 8;
            barrier_expect(barrier, CODE_BYTES + (with_scales ? SCALE_BYTES : 0));
            copy_box(ring + stage * CODE_BYTES, first ? maps.codes1 : maps.codes2,
                     position * (CHUNK / 2), row, depth, barrier);
            if (with_scales)
                copy_box(ring + STAGES * CODE_BYTES + scale_stage * SCALE_BYTES,
                         first ? maps.scales1 : maps.scales2, position * (CHUNK / 16), row, depth,
                         barrier);
        }
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        if (++position == num_stages) look_ahead(a);
    }
};

// Where a warp reads in its ring.
struct Reader {
    int stage = 0, scale_stage = 1, parity = 0;

    __device__ __forceinline__ void advance() {
        stage = stage == STAGES - 1 ? 0 : stage + 1;
        parity ^= stage == 0;
    }
};

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
                        decode(word_of(words[m][run], i), pairs[run]);
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

__global__ void __launch_bounds__(COMBINE_THREADS)
    combine_kernel(const __grid_constant__ Arguments a) {
    let_next_start();
    int index = static_cast<int>(blockIdx.x) * COMBINE_THREADS + static_cast<int>(threadIdx.x);
    int eighths = a.hidden / 8, slots_of_token = a.num_slots / a.num_tokens;
    int token = index / eighths, at = index % eighths;
    bool any = token < a.num_tokens;
    float sums[8] = {};
    for (int first = 0; first < slots_of_token; first += COMBINE_SLOTS) {
        // `multiply` gives none of these, so they are read before it is waited for.
        bool routed[COMBINE_SLOTS];
        float probabilities[COMBINE_SLOTS];
#pragma unroll
        for (int i = 0; i < COMBINE_SLOTS; ++i) {
            int slot = token * slots_of_token + first + i;
            routed[i] = any && first + i < slots_of_token && is_routed(a, a.experts[slot]);
            probabilities[i] = routed[i] ? a.probabilities[slot] : 0.0f;
        }
        if (first == 0) wait_for_previous();
        uint4 products[COMBINE_SLOTS];
#pragma unroll
        for (int i = 0; i < COMBINE_SLOTS; ++i) {
            int slot = token * slots_of_token + first + i;
            if (routed[i])
                products[i] = reinterpret_cast<const uint4*>(
                    a.products + static_cast<int64_t>(slot) * a.hidden)[at];
        }
#pragma unroll
        for (int i = 0; i < COMBINE_SLOTS; ++i) {
            if (!routed[i]) continue;
            const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&products[i]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                float2 two = __bfloat1622float2(pairs[j]);
                sums[2 * j] += probabilities[i] * two.x;
                sums[2 * j + 1] += probabilities[i] * two.y;
            }
        }
    }
    if (!any) return;
    uint4 result;
    auto* pairs = reinterpret_cast<__nv_bfloat162*>(&result);
#pragma unroll
    for (int j = 0; j < 4; ++j) pairs[j] = __floats2bfloat162_rn(sums[2 * j], sums[2 * j + 1]);
    reinterpret_cast<uint4*>(a.output + static_cast<int64_t>(token) * a.hidden)[at] = result;
}

// Describes bytes [depth, rows, columns] to the copy engine, and the box that a copy brings.
bool describe(
    CUtensorMap& map, const void* base, int64_t columns, int64_t rows, int64_t depth,
    uint32_t box_columns, uint32_t box_rows, uint32_t box_depth) {
    void* encode = nullptr;
    cudaDriverEntryPointQueryResult found;
    if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &encode, 12000,
                                         cudaEnableDefault, &found) != cudaSuccess ||
        found != cudaDriverEntryPointSuccess)
        return false;
    cuuint64_t sizes[3] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows),
                           static_cast<cuuint64_t>(depth)};
    cuuint64_t strides[2] = {sizes[0], sizes[0] * sizes[1]};
    cuuint32_t box[3] = {box_columns, box_rows, box_depth}, steps[3] = {1, 1, 1};
    constexpr auto FETCH = EXPERT_FETCH == 256   ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B
                           : EXPERT_FETCH == 128 ? CU_TENSOR_MAP_L2_PROMOTION_L2_128B
                                                 : CU_TENSOR_MAP_L2_PROMOTION_NONE;
    // The place of 16 bytes in a row is XORed with the row, so that lanes read different banks.
    auto swizzle = box_columns == 128 ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_32B;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(encode)(
               &map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(base), sizes, strides, box,
               steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, FETCH,
               CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

// Starts while the kernel before it runs, and waits for it inside.
template <class... Parameters>
cudaError_t launch_after(
    void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes,
    cudaStream_t stream, const Parameters&... parameters) {
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
    return cudaLaunchKernelEx(&config, kernel, parameters...);
}

// 2^32 / n, rounded up: for i below 2^32 / n, the upper half of its product with i is i / n.
uint32_t inverse_of(int n) {
    return static_cast<uint32_t>(((int64_t{1} << 32) + n - 1) / n);
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
    if (hidden % (2 * CHUNK) || width % (2 * CHUNK) || num_experts > MAX_EXPERTS ||
        num_blocks < 2 || num_tokens * slots_of_token > MAX_SLOTS)
        return -1;
    int items1 = width / (ROWS / 2), items2 = hidden / ROWS;
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
                num_tokens, num_tokens * slots_of_token, num_experts, hidden, width,
                1.0f / static_cast<float>(slots_of_token), items1, items2,
                inverse_of(items1), inverse_of(items2)};
    Maps maps;
    if (!describe(maps.codes1, codes1, hidden / 2, width, 2 * num_experts, CHUNK / 2, ROWS / 2,
                  2) ||
        !describe(maps.scales1, scales1, hidden / 16, width, 2 * num_experts, CHUNK / 8, ROWS / 2,
                  2) ||
        !describe(maps.codes2, codes2, width / 2, hidden, num_experts, CHUNK / 2, ROWS, 1) ||
        !describe(maps.scales2, scales2, width / 16, hidden, num_experts, CHUNK / 8, ROWS, 1))
        return -2;
    auto on = static_cast<cudaStream_t>(stream);
    int64_t values = static_cast<int64_t>(num_tokens) * hidden;
    cudaError_t error = launch_after(prepare_kernel, num_blocks, PREPARE_THREADS, 0, on, a);
    if (error != cudaSuccess) return error;
    error = cudaFuncSetAttribute(multiply_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 SHARED_BYTES);
    if (error != cudaSuccess) return error;
    error = launch_after(multiply_kernel, num_blocks, THREADS, SHARED_BYTES, on, a, maps);
    if (error != cudaSuccess) return error;
    return launch_after(combine_kernel, blocks_for(values / 8, COMBINE_THREADS), COMBINE_THREADS, 0,
                        on, a);
}

}  // extern "C"
