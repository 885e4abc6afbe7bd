// Decode attention over paged NVFP4 keys and values: one new token of each request.
//
// Legend: R requests, G key/value heads, H query heads of a key/value head, D head dim, S tokens of
// a page, P pages. A line is 144 bytes: the codes of 256 / D tokens, then their block scales. Pages
// are [P, G, S D / 256, 144]. A segment is one key/value head of one request; its context is cut
// into tiles of TOKENS tokens, and all tiles of all segments stand in one row. Block b of B takes
// tiles b T / B to (b + 1) T / B, whichever segments they are of, and leaves one partial result for
// each segment it has a part of; `combine` adds them up. So lengths never reach the host.
//
// A warp has its own tiles, its own place in shared memory for keys and for values, which bulk
// copies fill, and its own running softmax; warps meet only at the end of a segment.
//
// Scores are K q^T: tokens are the rows of an MMA and query heads its columns, so that no row is
// wasted where H is 8. Thread t of 4 holds columns t D / 4 to (t + 1) D / 4 of a token, as they
// are stored; q is permuted alike. Outputs are V^T p^T: columns are rows, tokens are summed over;
// thread g of 8 holds D / 8 neighbouring columns, and two tokens' words make pairs.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include "fp4.cuh"

namespace {

constexpr int LINES = 32;
constexpr int LINE_BYTES = 144;
constexpr int CODE_BYTES = 128;
// Warps of a block, one block for each multiprocessor: as many as registers allow, of which 64 NT
// of each thread hold the output. NT: groups of 8 query heads.
template <int NT>
constexpr int WARPS = NT == 1 ? 12 : 8;
template <int NT>
constexpr int THREADS = WARPS<NT> * 32;
constexpr float LOG2_E = 1.4426950408889634f;
// p is at most 2^(RAISED + SLACK) = 2^15, so that FP16 holds it and what is 2^-39 of it; the
// maximum is renewed only where a score exceeds it by more than SLACK powers of two.
constexpr float RAISED = 7.0f;
constexpr float SLACK = 8.0f;
constexpr float LOWEST = -1e30f;

struct Arguments {
    const __nv_bfloat16* query;
    __nv_bfloat16* output;
    const uint8_t* keys;
    const uint8_t* values;
    const float* key_scale;
    const float* value_scale;
    const int* block_table;
    const int* row_starts;
    const int* lengths;
    float4* partial;        // [R G + blocks, NT, D / 16, 32]
    float2* partial_sums;   // [R G + blocks, NT * 8]: maximum and sum
    int2* partial_range;    // [R G]: first block with a part of the segment, and last
    int num_requests, num_rows, num_heads, ratio, page_tokens, table_stride;
    float scale;
};

template <int D>
struct Shape {
    static constexpr int TOKENS_PER_LINE = 256 / D;
    static constexpr int TOKENS = LINES * TOKENS_PER_LINE;
    static constexpr int PLACE_BYTES = LINES * LINE_BYTES;     // keys or values of a tile
    static constexpr int TILES = D / 16;       // MMAs of 16 columns of the output
    static constexpr int MERGED = 4;           // of them, in one go
    static constexpr int KEY_WORDS = D / 32;   // of a token and thread
    static constexpr int VALUE_WORDS = D / 64;
};

template <int D, int NT>
struct Shared {
    using S = Shape<D>;
    static constexpr int PLACES_AT = 0;
    static constexpr int SUMS_AT = PLACES_AT + 2 * WARPS<NT> * S::PLACE_BYTES;
    static constexpr int QUERY_AT = SUMS_AT + WARPS<NT> * S::MERGED * 512;
    static constexpr int FACTORS_AT = QUERY_AT + NT * S::KEY_WORDS * 512;
    static constexpr int SOFTMAX_AT = FACTORS_AT + NT * 32;
    static constexpr int BARRIERS_AT = SOFTMAX_AT + WARPS<NT> * NT * 64;
    static constexpr int WARP_SUMS_AT = BARRIERS_AT + 2 * WARPS<NT> * 8;
    static constexpr int PREFIX_AT = WARP_SUMS_AT + WARPS<NT> * 4;
    static int bytes(int num_requests) { return PREFIX_AT + 4 * (num_requests + 1); }
};

// Where a row of tiles of a segment begins and ends.
struct Segment {
    int request = 0, head = 0, begin = 0, end = 0;

    // Goes on to the segment that has `tile`.
    __device__ __forceinline__ void seek(int tile, const int* prefix, int num_heads) {
        while (tile >= end) {
            if (++head >= num_heads) {
                head = 0;
                ++request;
            }
            begin = end;
            end = begin + prefix[request + 1] - prefix[request];
        }
    }

    __device__ __forceinline__ void find(
        int tile, const int* prefix, int num_requests, int num_heads) {
        int low = 0, high = num_requests - 1;
        while (low < high) {
            int middle = (low + high + 1) >> 1;
            if (prefix[middle] * num_heads <= tile) low = middle;
            else high = middle - 1;
        }
        request = low;
        int tiles = prefix[low + 1] - prefix[low];
        int rest = tile - prefix[low] * num_heads;
        head = rest / tiles;
        begin = prefix[low] * num_heads + head * tiles;
        end = begin + tiles;
    }
};

// Tiles before each request, per head; all threads of the block take part.
template <int TOKENS, int NT>
__device__ __forceinline__ void prefix_sums(
    const int* lengths, int num_requests, int* prefix, int* warp_sums) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int each = (num_requests + THREADS<NT> - 1) / THREADS<NT>;
    int first = threadIdx.x * each;
    int sum = 0;
    for (int i = 0; i < each; ++i) {
        if (first + i < num_requests) sum += (lengths[first + i] + TOKENS - 1) / TOKENS;
    }
    int inclusive = sum;
    for (int step = 1; step < 32; step *= 2) {
        int below = __shfl_up_sync(~0u, inclusive, step);
        if (lane >= step) inclusive += below;
    }
    if (lane == 31) warp_sums[warp] = inclusive;
    __syncthreads();
    int before = inclusive - sum;
    for (int i = 0; i < warp; ++i) before += warp_sums[i];
    for (int i = 0; i < each; ++i) {
        if (first + i < num_requests) {
            prefix[first + i] = before;
            before += (lengths[first + i] + TOKENS - 1) / TOKENS;
            if (first + i == num_requests - 1) prefix[num_requests] = before;
        }
    }
    __syncthreads();
}

template <int WORDS>
__device__ __forceinline__ void load_words(const uint8_t* from, uint32_t (&words)[WORDS]) {
    if constexpr (WORDS >= 4) {
#pragma unroll
        for (int i = 0; i < WORDS; i += 4) {
            uint4 four = *reinterpret_cast<const uint4*>(from + 4 * i);
            words[i] = four.x;
            words[i + 1] = four.y;
            words[i + 2] = four.z;
            words[i + 3] = four.w;
        }
    } else if constexpr (WORDS == 2) {
        uint2 two = *reinterpret_cast<const uint2*>(from);
        words[0] = two.x;
        words[1] = two.y;
    } else {
        words[0] = *reinterpret_cast<const uint32_t*>(from);
    }
}

// The next scale bytes in the low bits.
template <int BYTES>
__device__ __forceinline__ uint32_t load_scales(const uint8_t* from) {
    if constexpr (BYTES == 4) return *reinterpret_cast<const uint32_t*>(from);
    else if constexpr (BYTES == 2) return *reinterpret_cast<const uint16_t*>(from);
    else return *from;
}

template <int D>
__device__ __forceinline__ int line_of(int token) {
    return token / Shape<D>::TOKENS_PER_LINE * LINE_BYTES;
}

template <int D>
__device__ __forceinline__ const uint8_t* codes_of(const uint8_t* lines, int token) {
    return lines + line_of<D>(token) + token % Shape<D>::TOKENS_PER_LINE * (D / 2);
}

template <int D>
__device__ __forceinline__ const uint8_t* scales_at(const uint8_t* lines, int token) {
    return lines + line_of<D>(token) + CODE_BYTES + token % Shape<D>::TOKENS_PER_LINE * (D / 16);
}

// What a warp knows of the softmax of a segment; heads 2 t and 2 t + 1 of each group of 8.
template <int D, int NT>
struct Running {
    float output[NT][Shape<D>::TILES][4];
    float maximum[NT][2], sum[NT][2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int i = 0; i < Shape<D>::TILES; ++i) {
#pragma unroll
                for (int j = 0; j < 4; ++j) output[n][i][j] = 0.0f;
            }
            maximum[n][0] = maximum[n][1] = -INFINITY;
            sum[n][0] = sum[n][1] = 0.0f;
        }
    }
};

// Scores of 16 U tokens from `token` on.
template <int D, int NT, int U>
__device__ __forceinline__ void scores(
    const uint8_t* keys, const uint4* query, int token, int lane, float (&score)[U][NT][4]) {
    using S = Shape<D>;
    constexpr int WORDS = S::KEY_WORDS < 4 ? S::KEY_WORDS : 4;
    constexpr int SCALES = WORDS / 2;
    int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int u = 0; u < U; ++u) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) score[u][n][i] = 0.0f;
        }
    }
#pragma unroll
    for (int part = 0; part < S::KEY_WORDS / WORDS; ++part) {
        uint32_t words[U][2][WORDS], scale[U][2];
#pragma unroll
        for (int u = 0; u < U; ++u) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                int row = token + 16 * u + 8 * half + g;
                load_words(codes_of<D>(keys, row) + t * (D / 8) + part * 4 * WORDS,
                           words[u][half]);
                scale[u][half] = scales_of(load_scales<SCALES>(
                    scales_at<D>(keys, row) + t * (D / 64) + part * SCALES));
            }
        }
#pragma unroll
        for (int word = 0; word < WORDS; ++word) {
            uint4 q[NT];
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                q[n] = query[(n * S::KEY_WORDS + part * WORDS + word) * 32 + lane];
            }
#pragma unroll
            for (int u = 0; u < U; ++u) {
                uint32_t pairs[2][4];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    uint32_t twice =
                        word < 2 ? low_twice(scale[u][half]) : high_twice(scale[u][half]);
                    decode(words[u][half][word], pairs[half]);
#pragma unroll
                    for (int i = 0; i < 4; ++i) pairs[half][i] = times(pairs[half][i], twice);
                }
#pragma unroll
                for (int n = 0; n < NT; ++n) {
                    multiply_add(score[u][n], pairs[0][0], pairs[1][0], pairs[0][1], pairs[1][1],
                                 q[n].x, q[n].y);
                    multiply_add(score[u][n], pairs[0][2], pairs[1][2], pairs[0][3], pairs[1][3],
                                 q[n].z, q[n].w);
                }
            }
        }
    }
}

// Turns scores into weights, the second operand of p v.
template <int D, int NT, int U, bool MASKED>
__device__ __forceinline__ void softmax(
    float (&score)[U][NT][4], const float (&factor)[NT][2], Running<D, NT>& running, int token,
    int num_tokens, int lane, uint32_t (&weights)[U][NT][2]) {
    bool exceeds = false;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int u = 0; u < U; ++u) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                score[u][n][i] *= factor[n][i % 2];
                if (MASKED && token + 16 * u + 8 * (i / 2) + lane / 4 >= num_tokens)
                    score[u][n][i] = -INFINITY;
                exceeds |= score[u][n][i] > running.maximum[n][i % 2] + SLACK;
            }
        }
    }
    if (__any_sync(~0u, exceeds)) {
#pragma unroll
        for (int n = 0; n < NT; ++n) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float largest = running.maximum[n][i];
#pragma unroll
                for (int u = 0; u < U; ++u)
                    largest = fmaxf(largest, fmaxf(score[u][n][i], score[u][n][i + 2]));
#pragma unroll
                for (int step = 4; step < 32; step *= 2)
                    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
                // Equal where both are -inf: nothing has been seen.
                float old = running.maximum[n][i];
                float shrink = old == largest ? 1.0f : exp2_of(old - largest);
                running.maximum[n][i] = largest;
                running.sum[n][i] *= shrink;
#pragma unroll
                for (int tile = 0; tile < Shape<D>::TILES; ++tile) {
                    running.output[n][tile][i] *= shrink;
                    running.output[n][tile][i + 2] *= shrink;
                }
            }
        }
    }
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int u = 0; u < U; ++u) {
            float p[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                p[i] = exp2_of(score[u][n][i] - (running.maximum[n][i % 2] - RAISED));
                running.sum[n][i % 2] += p[i];
            }
            weights[u][n][0] = transposed(pair_of(p[0], p[1]));
            weights[u][n][1] = transposed(pair_of(p[2], p[3]));
        }
    }
}

// Codes and block scales of the values of a thread's 4 tokens of 16.
template <int D>
struct Values {
    static constexpr int WORDS = Shape<D>::VALUE_WORDS;
    static constexpr int SCALES = D == 256 ? 2 : 1;
    uint32_t words[4][WORDS], bytes[4];

    template <bool MASKED>
    __device__ __forceinline__ void load(
        const uint8_t* values, int token, int num_tokens, int lane) {
        int g = lane / 4, t = lane % 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            int row = token + 2 * t + i % 2 + 8 * (i / 2);
            load_words(codes_of<D>(values, row) + g * (D / 16), words[i]);
            bytes[i] = load_scales<SCALES>(scales_at<D>(values, row) + g * D / 128);
            // A weight of 0 does not take out the NaN that an older request may have left.
            if (MASKED && row >= num_tokens) bytes[i] = 0;
        }
    }
};

// Adds the values of 16 tokens, times their weights.
template <int D, int NT>
__device__ __forceinline__ void add(
    const Values<D>& values, const uint32_t (&weights)[NT][2], Running<D, NT>& running) {
    constexpr int SCALES = Values<D>::SCALES;
    uint32_t scale[2][SCALES];
#pragma unroll
    for (int two = 0; two < 2; ++two) {
        uint32_t first = values.bytes[2 * two], second = values.bytes[2 * two + 1];
        scale[two][0] = scales_of(bytes_of(first, second, 0x0040));
        if constexpr (SCALES == 2) scale[two][1] = scales_of(bytes_of(first, second, 0x0051));
    }
#pragma unroll
    for (int word = 0; word < Values<D>::WORDS; ++word) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            uint32_t pairs[2][4];
#pragma unroll
            for (int two = 0; two < 2; ++two) {
                decode(bytes_of(values.words[2 * two][word], values.words[2 * two + 1][word],
                                half ? 0x7632 : 0x5410),
                       pairs[two]);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    pairs[two][i] = times(pairs[two][i], scale[two][SCALES == 2 ? word / 2 : 0]);
            }
#pragma unroll
            for (int n = 0; n < NT; ++n) {
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    multiply_add(running.output[n][4 * word + 2 * half + i], pairs[0][2 * i],
                                 pairs[0][2 * i + 1], pairs[1][2 * i], pairs[1][2 * i + 1],
                                 weights[n][0], weights[n][1]);
                }
            }
        }
    }
}

// Attends to a tile. Keys are there; `used_keys` is called once they are not needed any more, and
// `await_values` before the first value is.
template <int D, int NT, bool MASKED, typename UsedKeys, typename AwaitValues>
__device__ __forceinline__ void attend(
    const uint8_t* keys, const uint8_t* values, const uint4* query, const float (&factor)[NT][2],
    int num_tokens, int lane, Running<D, NT>& running, UsedKeys used_keys,
    AwaitValues await_values) {
    using S = Shape<D>;
    constexpr int U = S::TOKENS >= 32 && NT == 1 ? 2 : 1;
    int end = MASKED ? num_tokens : S::TOKENS;
#pragma unroll 1
    for (int token = 0; token < end; token += 16 * U) {
        float score[U][NT][4];
        uint32_t weights[U][NT][2];
        scores<D, NT, U>(keys, query, token, lane, score);
        if (token + 16 * U >= end) used_keys();
        softmax<D, NT, U, MASKED>(score, factor, running, token, num_tokens, lane, weights);
        if (token == 0) await_values();
        Values<D> loaded[U];
#pragma unroll
        for (int u = 0; u < U; ++u)
            loaded[u].template load<MASKED>(values, token + 16 * u, num_tokens, lane);
#pragma unroll
        for (int u = 0; u < U; ++u) add<D, NT>(loaded[u], weights[u], running);
    }
}

// Writes q of a segment as FP16 operands, each head scaled by a power of two into FP16's range, and
// the factors that turn scores into powers of two.
template <int D, int NT>
__device__ __forceinline__ void load_query(
    const Arguments& a, int request, int head, uint4* query, float* factors) {
    using S = Shape<D>;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    __half* halves = reinterpret_cast<__half*>(query);
    float common = a.scale * LOG2_E * UNIT * *a.key_scale;
    const __nv_bfloat16* rows =
        a.query + (static_cast<int64_t>(a.row_starts[request]) * a.num_heads + head) * a.ratio * D;
    for (int n = warp; n < NT * 8; n += WARPS<NT>) {
        constexpr int EACH = D / 32;
        float x[EACH];
        float largest = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            x[i] = n < a.ratio ? __bfloat162float(rows[n * D + i * 32 + lane]) : 0.0f;
            largest = fmaxf(largest, fabsf(x[i]));
        }
#pragma unroll
        for (int step = 1; step < 32; step *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, step));
        // The largest becomes 2^13 to 2^14. Both powers must be normal.
        int exponent = static_cast<int>(__float_as_uint(largest) >> 23) - 127 - 13;
        exponent = max(-126, min(126, exponent));
        float down = __uint_as_float((127 - exponent) << 23);
        if (lane == 0) factors[n] = common * __uint_as_float((127 + exponent) << 23);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            int column = i * 32 + lane;
            int t = column / (D / 4), word = column % (D / 4) / 8, code = column % 8;
            int slot = ((n / 8 * S::KEY_WORDS + word) * 32 + n % 8 * 4 + t) * 4 + code % 4;
            halves[2 * slot + code / 4] = __float2half_rn(x[i] * down);
        }
    }
}

__device__ __forceinline__ float4 sum_of(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}

// Writes two columns of two heads of the output.
template <int D>
__device__ __forceinline__ void write(
    const Arguments& a, int request, int head, int n, int tile, int lane, float4 sum, float first,
    float second) {
    int column = lane / 4 * (D / 8) + 2 * tile, of_head = n * 8 + lane % 4 * 2;
    int64_t row = static_cast<int64_t>(a.row_starts[request]) * a.num_heads + head;
    auto* to = reinterpret_cast<__nv_bfloat162*>(a.output + (row * a.ratio + of_head) * D + column);
    if (of_head < a.ratio) to[0] = __floats2bfloat162_rn(sum.x * first, sum.z * first);
    if (of_head + 1 < a.ratio) to[D / 2] = __floats2bfloat162_rn(sum.y * second, sum.w * second);
}

// Adds up what the warps of a block have of a segment, and writes it: the outputs if the block has
// all of it, else a partial result.
template <int D, int NT>
__device__ __forceinline__ void merge(
    const Arguments& a, const Segment& segment, bool whole, int slot, float4* sums,
    float2* softmaxes, Running<D, NT>& running) {
    using S = Shape<D>;
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float sum = running.sum[n][i];
#pragma unroll
            for (int step = 4; step < 32; step *= 2) sum += __shfl_xor_sync(~0u, sum, step);
            if (g == 0) {
                softmaxes[warp * NT * 8 + n * 8 + 2 * t + i] =
                    make_float2(running.maximum[n][i], sum);
            }
        }
    }
    __syncthreads();
    float value_scale = *a.value_scale * UNIT;
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        float total[2], largest[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int head = n * 8 + 2 * t + i;
            largest[i] = -INFINITY;
            for (int w = 0; w < WARPS<NT>; ++w)
                largest[i] = fmaxf(largest[i], softmaxes[w * NT * 8 + head].x);
            total[i] = 0.0f;
            for (int w = 0; w < WARPS<NT>; ++w) {
                float2 of_warp = softmaxes[w * NT * 8 + head];
                total[i] += of_warp.y * (of_warp.x == -INFINITY ? 0.0f
                                                                : exp2_of(of_warp.x - largest[i]));
            }
            float own = running.maximum[n][i];
            float shrink = own == -INFINITY ? 0.0f : exp2_of(own - largest[i]);
#pragma unroll
            for (int tile = 0; tile < S::TILES; ++tile) {
                running.output[n][tile][i] *= shrink;
                running.output[n][tile][i + 2] *= shrink;
            }
            if (!whole && warp == 0 && g == 0)
                a.partial_sums[static_cast<int64_t>(slot) * NT * 8 + head] =
                    make_float2(largest[i], total[i]);
        }
#pragma unroll
        for (int from = 0; from < S::TILES; from += S::MERGED) {
#pragma unroll
            for (int i = 0; i < S::MERGED; ++i) {
                float(&c)[4] = running.output[n][from + i];
                sums[(warp * S::MERGED + i) * 32 + lane] = make_float4(c[0], c[1], c[2], c[3]);
            }
            __syncthreads();
            for (int i = warp; i < S::MERGED; i += WARPS<NT>) {
                float4 sum = sums[i * 32 + lane];
                for (int w = 1; w < WARPS<NT>; ++w)
                    sum = sum_of(sum, sums[(w * S::MERGED + i) * 32 + lane]);
                int tile = from + i;
                if (whole) {
                    write<D>(a, segment.request, segment.head, n, tile, lane, sum,
                             value_scale / total[0], value_scale / total[1]);
                } else {
                    int64_t place = (static_cast<int64_t>(slot) * NT + n) * S::TILES + tile;
                    a.partial[place * 32 + lane] = sum;
                }
            }
            __syncthreads();
        }
    }
}

template <int D, int NT>
__global__ void __launch_bounds__(THREADS<NT>, 1)
    attention_kernel(const __grid_constant__ Arguments a) {
    using S = Shape<D>;
    using At = Shared<D, NT>;
    extern __shared__ __align__(128) uint8_t shared[];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto* query = reinterpret_cast<uint4*>(shared + At::QUERY_AT);
    auto* factors = reinterpret_cast<float*>(shared + At::FACTORS_AT);
    auto* prefix = reinterpret_cast<int*>(shared + At::PREFIX_AT);
    uint8_t* keys = shared + At::PLACES_AT + 2 * warp * S::PLACE_BYTES;
    uint8_t* values = keys + S::PLACE_BYTES;
    uint32_t has_keys = shared_address(shared + At::BARRIERS_AT) + 16 * warp;
    uint32_t has_values = has_keys + 8;
    if (lane < 2) barrier_init(has_keys + 8 * lane);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;");
    prefix_sums<S::TOKENS, NT>(a.lengths, a.num_requests, prefix,
                               reinterpret_cast<int*>(shared + At::WARP_SUMS_AT));

    int64_t num_tiles = static_cast<int64_t>(prefix[a.num_requests]) * a.num_heads;
    // No more blocks than give four warps, one of each scheduler, a tile.
    int64_t blocks = min(static_cast<int64_t>(gridDim.x), (num_tiles + 3) / 4);
    if (blockIdx.x >= blocks) return;
    int first = static_cast<int>(num_tiles * blockIdx.x / blocks);
    int last = static_cast<int>(num_tiles * (blockIdx.x + 1) / blocks);

    // The next tile's keys are copied as soon as this one's have been multiplied, its values
    // likewise, and the page id of the tile after it is on the way.
    int chunk = min(a.page_tokens, S::TOKENS);
    int chunk_bytes = chunk / S::TOKENS_PER_LINE * LINE_BYTES;
    int64_t head_bytes =
        static_cast<int64_t>(a.page_tokens) / S::TOKENS_PER_LINE * LINE_BYTES;
    Segment copied;
    copied.find(first, prefix, a.num_requests, a.num_heads);
    int copied_length = a.lengths[copied.request];
    int next = first + warp, next_page = 0, next_chunks = 0, next_offset = 0, next_head = 0;
    auto prepare = [&]() {
        next_chunks = 0;
        if (next >= last) return;
        if (next >= copied.end) {
            copied.seek(next, prefix, a.num_heads);
            copied_length = a.lengths[copied.request];
        }
        int token = (next - copied.begin) * S::TOKENS;
        next_chunks = min(S::TOKENS / chunk, (copied_length - token + chunk - 1) / chunk);
        token += lane * chunk;
        next_offset = token % a.page_tokens / S::TOKENS_PER_LINE * LINE_BYTES;
        next_head = copied.head;
        if (lane < next_chunks) {
            next_page = __ldg(a.block_table +
                              static_cast<int64_t>(copied.request) * a.table_stride +
                              token / a.page_tokens);
        }
        next += WARPS<NT>;
    };
    auto copy = [&](uint8_t* to, const uint8_t* pages, uint32_t barrier) {
        if (next_chunks == 0) return;
        if (lane == 0) barrier_expect(barrier, next_chunks * chunk_bytes);
        __syncwarp();
        if (lane < next_chunks) {
            int64_t offset = (static_cast<int64_t>(next_page) * a.num_heads + next_head) *
                                 head_bytes + next_offset;
            copy_async(shared_address(to) + lane * chunk_bytes, pages + offset, chunk_bytes,
                       barrier);
        }
    };
    auto copy_keys = [&]() {
        __syncwarp();
        copy(keys, a.keys, has_keys);
    };
    auto copy_values = [&]() {
        __syncwarp();
        copy(values, a.values, has_values);
        prepare();
    };
    prepare();
    copy_keys();
    copy_values();

    Segment segment;
    segment.find(first, prefix, a.num_requests, a.num_heads);
    int parity = 0, tile = first + warp;
    while (true) {
        load_query<D, NT>(a, segment.request, segment.head, query, factors);
        int length = a.lengths[segment.request];
        Running<D, NT> running;
        running.clear();
        __syncthreads();
        float factor[NT][2];
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            factor[n][0] = factors[n * 8 + lane % 4 * 2];
            factor[n][1] = factors[n * 8 + lane % 4 * 2 + 1];
        }
        int end = min(segment.end, last);
        for (; tile < end; tile += WARPS<NT>) {
            barrier_wait(has_keys, parity);
            auto await_values = [&]() { barrier_wait(has_values, parity); };
            int num_tokens = length - (tile - segment.begin) * S::TOKENS;
            if (num_tokens >= S::TOKENS)
                attend<D, NT, false>(keys, values, query, factor, num_tokens, lane, running,
                                     copy_keys, await_values);
            else
                attend<D, NT, true>(keys, values, query, factor, num_tokens, lane, running,
                                    copy_keys, await_values);
            copy_values();
            parity ^= 1;
        }
        int index = segment.request * a.num_heads + segment.head;
        bool whole = segment.begin >= first && segment.end <= last;
        if (segment.begin >= first && threadIdx.x == 0) {
            // The block that has the segment's last tile.
            int with_last = static_cast<int>((static_cast<int64_t>(segment.end) * blocks - 1) /
                                             num_tiles);
            a.partial_range[index] = make_int2(blockIdx.x, whole ? -1 : with_last);
        }
        merge<D, NT>(a, segment, whole, index + blockIdx.x,
                     reinterpret_cast<float4*>(shared + At::SUMS_AT),
                     reinterpret_cast<float2*>(shared + At::SOFTMAX_AT), running);
        if (segment.end >= last) return;
        segment.seek(segment.end, prefix, a.num_heads);
    }
}

// Writes 0 to rows of the output that no request has.
__device__ __forceinline__ void clear(
    const Arguments& a, int from, int to, int head, int num_heads, int head_dim) {
    int width = num_heads * a.ratio * head_dim / 8;
    for (int row = from; row < to; ++row) {
        auto* at = reinterpret_cast<uint4*>(
            a.output + (static_cast<int64_t>(row) * a.num_heads + head) * a.ratio * head_dim);
        for (int i = threadIdx.x; i < width; i += blockDim.x) at[i] = make_uint4(0, 0, 0, 0);
    }
}

// Adds up the partial results of a segment (x), of 16 columns and 8 heads (y), 8 ways.
template <int D, int NT>
__global__ void __launch_bounds__(256) combine_kernel(const __grid_constant__ Arguments a) {
    using S = Shape<D>;
    constexpr int WAYS = 8;
    int index = blockIdx.x, request = index / a.num_heads, head = index % a.num_heads;
    if (blockIdx.y == 0) {
        if (index == 0) clear(a, a.row_starts[a.num_requests], a.num_rows, 0, a.num_heads, D);
        if (a.lengths[request] == 0)
            clear(a, a.row_starts[request], a.row_starts[request + 1], head, 1, D);
    }
    if (a.lengths[request] == 0) return;
    asm volatile("griddepcontrol.wait;" ::: "memory");
    int2 range = a.partial_range[index];
    if (range.y < 0) return;
    int lane = threadIdx.x % 32, way = threadIdx.x / 32;
    int n = blockIdx.y / S::TILES, tile = blockIdx.y % S::TILES;
    const float2* softmaxes =
        a.partial_sums + static_cast<int64_t>(index) * NT * 8 + n * 8 + lane % 4 * 2;
    const float4* parts =
        a.partial + (static_cast<int64_t>(index) * NT * S::TILES + blockIdx.y) * 32 + lane;
    float largest[2] = {LOWEST, LOWEST}, total[2] = {0.0f, 0.0f};
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    auto include = [&](float4 two, float4 part) {
        float first = fmaxf(largest[0], two.x), second = fmaxf(largest[1], two.z);
        float shrink[2] = {exp2_of(largest[0] - first), exp2_of(largest[1] - second)};
        float grow[2] = {exp2_of(fmaxf(two.x, LOWEST) - first),
                         exp2_of(fmaxf(two.z, LOWEST) - second)};
        largest[0] = first;
        largest[1] = second;
        total[0] = total[0] * shrink[0] + two.y * grow[0];
        total[1] = total[1] * shrink[1] + two.w * grow[1];
        sum = make_float4(
            sum.x * shrink[0] + part.x * grow[0], sum.y * shrink[1] + part.y * grow[1],
            sum.z * shrink[0] + part.z * grow[0], sum.w * shrink[1] + part.w * grow[1]);
    };
#pragma unroll 4
    for (int64_t slot = range.x + way; slot <= range.y; slot += WAYS) {
        include(*reinterpret_cast<const float4*>(softmaxes + slot * NT * 8),
                parts[slot * NT * S::TILES * 32]);
    }
    __shared__ float4 sums[WAYS][32], totals[WAYS][32];
    sums[way][lane] = sum;
    totals[way][lane] = make_float4(largest[0], total[0], largest[1], total[1]);
    __syncthreads();
    if (way > 0) return;
#pragma unroll
    for (int other = 1; other < WAYS; ++other) include(totals[other][lane], sums[other][lane]);
    float value_scale = *a.value_scale * UNIT;
    write<D>(a, request, head, n, tile, lane, sum, value_scale / total[0], value_scale / total[1]);
}

template <int D, int NT>
int launch(const Arguments& a, int num_blocks, cudaStream_t stream) {
    int bytes = Shared<D, NT>::bytes(a.num_requests);
    cudaError_t error = cudaFuncSetAttribute(
        attention_kernel<D, NT>, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    attention_kernel<D, NT><<<num_blocks, THREADS<NT>, bytes, stream>>>(a);
    error = cudaGetLastError();
    if (error != cudaSuccess) return error;
    // Starts while the first kernel runs, and waits for it inside.
    cudaLaunchAttribute attribute{};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = dim3(a.num_requests * a.num_heads, NT * Shape<D>::TILES);
    config.blockDim = dim3(256);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = 1;
    return cudaLaunchKernelEx(&config, combine_kernel<D, NT>, a);
}

}  // namespace

extern "C" {

// Starts both kernels; gives a cudaError_t, or -1 for a head dim or ratio without kernel.
int trace_decode_attention(
    const void* query, void* output, const void* keys, const void* values, const void* key_scale,
    const void* value_scale, const void* block_table, const void* row_starts, const void* lengths,
    void* partial, void* partial_sums, void* partial_range, int num_requests, int num_rows,
    int num_heads, int ratio, int head_dim, int page_tokens, int table_stride, float scale,
    int num_blocks, void* stream) {
    Arguments a{static_cast<const __nv_bfloat16*>(query),
                static_cast<__nv_bfloat16*>(output),
                static_cast<const uint8_t*>(keys),
                static_cast<const uint8_t*>(values),
                static_cast<const float*>(key_scale),
                static_cast<const float*>(value_scale),
                static_cast<const int*>(block_table),
                static_cast<const int*>(row_starts),
                static_cast<const int*>(lengths),
                static_cast<float4*>(partial),
                static_cast<float2*>(partial_sums),
                static_cast<int2*>(partial_range),
                num_requests, num_rows, num_heads, ratio, page_tokens, table_stride, scale};
    auto on = static_cast<cudaStream_t>(stream);
    if (ratio < 1 || ratio > 16) return -1;
    bool wide = ratio > 8;
    switch (head_dim) {
        case 64:
            return wide ? launch<64, 2>(a, num_blocks, on) : launch<64, 1>(a, num_blocks, on);
        case 128:
            return wide ? launch<128, 2>(a, num_blocks, on) : launch<128, 1>(a, num_blocks, on);
        case 256:
            return wide ? launch<256, 2>(a, num_blocks, on) : launch<256, 1>(a, num_blocks, on);
        default:
            return -1;
    }
}

}  // extern "C"
