// Which items a warp takes, and the ring that the copy engine fills for it.
#pragma once
#include "experts_layout.cuh"
#include "fp4.cuh"

namespace {

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

}  // namespace
