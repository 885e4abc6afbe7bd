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
#include <cuda_runtime.h>

#include "experts_multiply.cuh"
#include "experts_prepare.cuh"

// Bytes that the L2 cache fetches where a copy misses: 0 (what is asked for), 128 or 256.
#ifndef EXPERT_FETCH
#define EXPERT_FETCH 0
#endif

namespace {

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
