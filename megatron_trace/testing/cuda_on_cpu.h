// A grid of CUDA threads on one CPU thread: what `experts_on_cpu.py` includes in place of PTX.
//
// Every thread is a fiber that runs until it waits: at a shuffle or `__syncwarp` for its warp, at
// `__syncthreads` for its block, at a barrier in shared memory for copies. Warps take turns at
// random, so that what depends on their order shows. Copies into shared memory arrive at once, or
// as late as a program may expect them (`late_copies`): the first shows what they overwrite too
// early, the second what is read before it is waited for.
#pragma once
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __grid_constant__
#define __grid_constant__

using std::max;
using std::min;

namespace on_cpu {

constexpr size_t STACK_BYTES = 1 << 17;

struct Thread {
    ucontext_t context;
    uint3 index, block_index;
    int warp, block;
    bool done = false;
};

// What the lanes of a warp bring to a shuffle; two turns, as a lane may be one ahead.
struct Warp {
    int arrived = 0;
    unsigned turn = 0;
    uint8_t values[2][32][64];
};

struct Block {
    int arrived = 0;
    unsigned turn = 0;
    std::vector<uint8_t> shared;
};

// A matrix [depth, rows, columns] of bytes and the box that a copy brings.
struct Map {
    const uint8_t* base;
    int64_t columns, rows, depth;
    int box_columns, box_rows, box_depth;
};

// A barrier in shared memory: its parity; twice the bytes it waits for, and 1 if it was armed.
struct Barrier {
    uint32_t parity;
    int32_t pending;
};

struct Copy {
    int block;
    uint32_t barrier;
    std::function<void()> run;
};

inline Thread* current;
inline ucontext_t scheduler;
inline std::vector<Warp> warps;
inline std::vector<Block> blocks;
inline std::vector<Copy> copies;  // that have not arrived
inline uint3 grid, threads_of_block;
inline bool late_copies, has_failed;
inline std::function<void()> kernel_body;

inline void yield() { swapcontext(&current->context, &scheduler); }

// Ends the launch with an error; a thread that fails does not come back.
inline void fail(const char* why) {
    std::fprintf(stderr, "cuda_on_cpu: %s\n", why);
    has_failed = true;
    while (current != nullptr) yield();
}

inline void run_thread() {
    kernel_body();
    current->done = true;
    for (;;) yield();
}

// Gives the value of lane `from`; all lanes' if asked for.
template <class T>
T exchange(T value, int from, T* all = nullptr) {
    static_assert(sizeof(T) <= 64);
    Warp& warp = warps[current->warp];
    unsigned turn = warp.turn;
    std::memcpy(warp.values[turn & 1][current->index.x % 32], &value, sizeof(T));
    if (++warp.arrived == 32) {
        warp.arrived = 0;
        ++warp.turn;
    } else {
        while (warp.turn == turn) yield();
    }
    for (int lane = 0; all != nullptr && lane < 32; ++lane)
        std::memcpy(&all[lane], warp.values[turn & 1][lane], sizeof(T));
    T result;
    std::memcpy(&result, warp.values[turn & 1][from & 31], sizeof(T));
    return result;
}

inline uint8_t* shared(uint32_t offset, size_t num_bytes) {
    auto& bytes = blocks[current->block].shared;
    if (offset + num_bytes > bytes.size()) fail("outside of shared memory");
    return bytes.data() + offset;
}

inline Barrier& barrier_at(int block, uint32_t offset) {
    return *reinterpret_cast<Barrier*>(blocks[block].shared.data() + offset);
}

inline void complete(Barrier& barrier) {
    if (barrier.pending != 1) return;
    barrier.parity ^= 1;
    barrier.pending = 0;
}

inline void barrier_init(uint32_t at) { barrier_at(current->block, at) = {0, 0}; }

inline void barrier_expect(uint32_t at, uint32_t num_bytes) {
    Barrier& barrier = barrier_at(current->block, at);
    if (barrier.pending & 1) fail("a barrier was armed before its copies had arrived");
    barrier.pending += 2 * num_bytes + 1;
    complete(barrier);
}

inline void barrier_wait(uint32_t at, uint32_t parity) {
    for (size_t i = 0; i < copies.size();) {
        if (copies[i].block == current->block && copies[i].barrier == at) {
            auto run = copies[i].run;
            copies.erase(copies.begin() + i);
            run();
        } else {
            ++i;
        }
    }
    while (barrier_at(current->block, at).parity == parity) yield();
}

// 16 bytes lie where the copy engine's swizzles of 128 and 32 bytes put them.
inline void copy_box(
    uint32_t to, const Map& map, int column, int row, int depth, uint32_t barrier) {
    int block = current->block;
    if (column + map.box_columns > map.columns || row + map.box_rows > map.rows ||
        depth + map.box_depth > map.depth)
        fail("a copy reads outside of its matrix");
    if (to % (map.box_columns == 128 ? 1024 : 256)) fail("a copy is not aligned to its swizzle");
    auto run = [=] {
        uint8_t* bytes = blocks[block].shared.data();
        uint32_t at = to;
        for (int d = 0; d < map.box_depth; ++d) {
            for (int r = 0; r < map.box_rows; ++r) {
                for (int c = 0; c < map.box_columns; ++c, ++at) {
                    uint32_t turn = map.box_columns == 128 ? at >> 7 & 7 : at >> 7 & 1;
                    bytes[at ^ turn << 4] =
                        map.base[((depth + d) * map.rows + row + r) * map.columns + column + c];
                }
            }
        }
        Barrier& counted = barrier_at(block, barrier);
        counted.pending -= 2 * map.box_depth * map.box_rows * map.box_columns;
        complete(counted);
    };
    if (late_copies) copies.push_back({block, barrier, run});
    else run();
}

inline float half_of(uint32_t pair, int which) {
    __half_raw raw;
    raw.x = static_cast<uint16_t>(pair >> 16 * which);
    return __half2float(__half(raw));
}

// m16n8k16, sums in FP64.
inline void multiply_add(
    float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
    struct Fragment {
        uint32_t a[4], b[2];
    } all[32];
    exchange(Fragment{{a0, a1, a2, a3}, {b0, b1}}, 0, all);
    int lane = current->index.x % 32;
    for (int i = 0; i < 4; ++i) {
        int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
        double sum = c[i];
        for (int k = 0; k < 16; ++k) {
            const Fragment& of_row = all[row % 8 * 4 + k % 8 / 2];
            const Fragment& of_column = all[column * 4 + k % 8 / 2];
            sum += static_cast<double>(half_of(of_row.a[row / 8 + k / 8 * 2], k % 2)) *
                   half_of(of_column.b[k / 8], k % 2);
        }
        c[i] = static_cast<float>(sum);
    }
}

inline uint32_t times(uint32_t a, uint32_t b) {
    uint32_t result = 0;
    for (int i = 0; i < 2; ++i) {
        __half_raw raw = __float2half_rn(half_of(a, i) * half_of(b, i));
        result |= static_cast<uint32_t>(raw.x) << 16 * i;
    }
    return result;
}

// An 8 x 8 matrix of 16-bit numbers, a row in four neighbouring lanes, transposed.
inline uint32_t transposed(uint32_t row) {
    uint32_t all[32];
    exchange(row, 0, all);
    int lane = current->index.x % 32;
    uint32_t result = 0;
    for (int i = 0; i < 2; ++i) {
        uint32_t pair = all[(lane % 4 * 2 + i) * 4 + lane / 8];
        result |= (pair >> 16 * (lane / 4 % 2) & 0xFFFF) << 16 * i;
    }
    return result;
}

inline uint32_t scales_of(uint32_t two_bytes) {
    uint32_t result = 0;
    for (int i = 0; i < 2; ++i) {
        __half_raw raw = __nv_cvt_fp8_to_halfraw(two_bytes >> 8 * i & 0xFF, __NV_E4M3);
        result |= static_cast<uint32_t>(raw.x) << 16 * i;
    }
    return result;
}

// Runs a kernel. Blocks with dynamic shared memory run side by side, others one after the other.
template <class Kernel, class... Parameters>
cudaError_t launch(
    Kernel kernel, int64_t num_blocks, int num_threads, int shared_bytes,
    const Parameters&... parameters) {
    grid = {static_cast<unsigned>(num_blocks), 1, 1};
    threads_of_block = {static_cast<unsigned>(num_threads), 1, 1};
    kernel_body = [&] { kernel(parameters...); };
    has_failed = false;
    copies.clear();
    int64_t at_once = shared_bytes ? num_blocks : 1;
    size_t count = static_cast<size_t>(at_once * num_threads);
    std::vector<uint8_t> stacks(count * STACK_BYTES);
    for (int64_t first = 0; first < num_blocks; first += at_once) {
        std::vector<Thread> threads(count);
        warps.assign(count / 32, {});
        blocks.assign(static_cast<size_t>(at_once), {});
        for (auto& block : blocks) block.shared.assign(shared_bytes, 0xAB);
        for (size_t i = 0; i < count; ++i) {
            Thread& thread = threads[i];
            thread.block = static_cast<int>(i) / num_threads;
            thread.index = {static_cast<unsigned>(i % num_threads), 0, 0};
            thread.block_index = {static_cast<unsigned>(first) + thread.block, 0, 0};
            thread.warp = static_cast<int>(i / 32);
            getcontext(&thread.context);
            thread.context.uc_stack = {stacks.data() + i * STACK_BYTES, 0, STACK_BYTES};
            thread.context.uc_link = &scheduler;
            makecontext(&thread.context, run_thread, 0);
        }
        size_t left = count, turns = 0;
        while (left > 0) {
            current = nullptr;
            if (++turns > 40'000) fail("the kernel does not end");
            if (has_failed) return cudaErrorLaunchFailure;
            size_t warp = std::rand() % (count / 32);
            for (int turn = std::rand() % 40; turn >= 0 && !has_failed; --turn) {
                for (int lane = 0; lane < 32; ++lane) {
                    current = &threads[warp * 32 + lane];
                    if (current->done) continue;
                    swapcontext(&scheduler, &current->context);
                    if (has_failed) break;
                    left -= current->done;
                }
            }
        }
    }
    return cudaSuccess;
}

}  // namespace on_cpu

#define threadIdx (on_cpu::current->index)
#define blockIdx (on_cpu::current->block_index)
#define blockDim on_cpu::threads_of_block
#define gridDim on_cpu::grid

inline void __syncwarp() { on_cpu::exchange(0, 0); }

template <class T>
T __shfl_sync(unsigned, T value, int from) {
    return on_cpu::exchange(value, from);
}

template <class T>
T __shfl_xor_sync(unsigned, T value, int mask) {
    return on_cpu::exchange(value, static_cast<int>(threadIdx.x) % 32 ^ mask);
}

template <class T>
T __shfl_up_sync(unsigned, T value, int by) {
    int lane = static_cast<int>(threadIdx.x) % 32;
    return on_cpu::exchange(value, lane >= by ? lane - by : lane);
}

inline bool __all_sync(unsigned, bool value) {
    bool all[32], result = true;
    on_cpu::exchange(value, 0, all);
    for (bool one : all) result = result && one;
    return result;
}

inline void __syncthreads() {
    on_cpu::Block& block = on_cpu::blocks[on_cpu::current->block];
    unsigned turn = block.turn;
    if (++block.arrived == static_cast<int>(blockDim.x)) {
        block.arrived = 0;
        ++block.turn;
    } else {
        while (block.turn == turn) on_cpu::yield();
    }
}

inline void __nanosleep(unsigned) { on_cpu::yield(); }

inline int atomicAdd(int* at, int value) {
    int before = *at;
    *at += value;
    return before;
}

inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector) {
    uint64_t both = static_cast<uint64_t>(high) << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; ++i)
        result |= static_cast<uint32_t>(both >> 8 * (selector >> 4 * i & 7) & 0xFF) << 8 * i;
    return result;
}

inline uint32_t __float_as_uint(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float __uint_as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

inline uint32_t __umulhi(uint32_t a, uint32_t b) {
    return static_cast<uint32_t>(static_cast<uint64_t>(a) * b >> 32);
}

inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
