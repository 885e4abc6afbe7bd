// Slots by expert, and tokens quantised: the first of the experts' three kernels.
#pragma once
#include "experts_layout.cuh"
#include "experts_quantise.cuh"

namespace {

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

}  // namespace
