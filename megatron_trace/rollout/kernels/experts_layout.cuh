// Sizes of the experts' kernels, what they are given, and how tokens lie in memory.
//
// The legend is that of `experts.cu`.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cstdint>

#ifndef EXPERT_WARPS
#define EXPERT_WARPS 12
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

enum class Part { FC1, FC2, NONE };

// Weights as the copy engine sees them.
struct Maps {
    CUtensorMap codes1, scales1, codes2, scales2;
};

// Whether a slot has an expert.
__device__ __forceinline__ bool is_routed(const Arguments& a, int64_t expert) {
    return expert >= 0 && expert < a.num_experts;
}

// In bytes: where operands of eight columns from `column` on lie in a row.
__device__ __forceinline__ int operand_offset(int column) {
    int in_chunk = column % CHUNK;
    return column / CHUNK * (2 * CHUNK) + in_chunk % 64 / 8 * 64 + in_chunk / 64 * 16;
}

__device__ __forceinline__ void wait_for_previous() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void let_next_start() {
    asm volatile("griddepcontrol.launch_dependents;");
}

}  // namespace
