/* The engine's operations on a CPU: what torch_ops.py computes, in one pass each. cpu_ops.py compiles and calls them.

   Compiled once per dtype: with -DBF16 numbers are bf16, else fp32. All arithmetic is in fp32, and only what is written to memory
   is rounded to bf16: fewer roundings than torch's, so the sampler's log-probs stay close to the trainer's although sums have another
   order. The residual x is fp32 in either case. A row's result does not depend on the other rows. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* A tile of a product, TILE_ROWS × TILE_COLUMNS vectors of sums, fills the registers; so do COLUMNS vectors, whose lanes are rows. */
#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#define TILE_ROWS 8
#define TILE_COLUMNS 3
#define COLUMNS 24
#elif defined(__AVX2__)
#define LANES 8
#define TILE_ROWS 4
#define TILE_COLUMNS 3
#define COLUMNS 12
#else
#define LANES 4
#define TILE_ROWS 4
#define TILE_COLUMNS 4
#define COLUMNS 12
#endif
#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("unroll")
#else
#define UNROLL _Pragma("GCC unroll 32")
#endif
#define WORTH_THREADS (1 << 16) /* elements: waking a thread takes as long as computing this many */

typedef float vector __attribute__((vector_size(4 * LANES)));

INLINE float from_bits(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
INLINE uint32_t to_bits(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }

#ifdef BF16
typedef uint16_t number;
INLINE float load(number x) { return from_bits((uint32_t)x << 16); }
INLINE number store(float x) { /* to the nearest, ties to even; a NaN stays one */
    uint32_t bits = to_bits(x);
    return x != x ? 0x7FC0 : (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16;
}
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
INLINE vector load_vector(const number *at) {
    halves loaded;
    memcpy(&loaded, at, sizeof loaded);
    return (vector)(__builtin_convertvector(loaded, words) << 16);
}
#else
typedef float number;
INLINE float load(number x) { return x; }
INLINE number store(float x) { return x; }
INLINE vector load_vector(const number *at) { vector loaded; memcpy(&loaded, at, sizeof loaded); return loaded; }
#endif

#define FARTHEST 0x42AE0000u /* the bits of 87.0f: e^-88 is subnormal */
INLINE float exp_of(float given) { /* 2^n · e^r, |r| ≤ log(2) / 2; within two units in the last place, and not beyond e^±87 */
    /* Limits in integers: with `x < -87 ? -87 : x` compilers compute on with the constants, for all numbers, and get subnormal ones, each
       of which takes a processor a hundred cycles. */
    uint32_t bits = to_bits(given), size = bits & 0x7FFFFFFFu;
    float x = from_bits((size > FARTHEST ? FARTHEST : size) | (bits & 0x80000000u));
    float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* to the nearest integer */
    float r = x - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    float power = (p * r * r + r + 1.0f) * from_bits((uint32_t)((int32_t)n + 127) << 23);
    return given != given ? given : power;
}

/* Norms and SwiGLU ------------------------------------------------------------------------------------------------ */

/* sum = x + delta (delta may be missing); out = weight · sum / rms(sum). */
void add_norm(const float *x, const number *delta, const number *weight, number *out, float *sum, long T, long D, float eps, int threads) {
#pragma omp parallel for num_threads(threads) if (T * D > WORTH_THREADS)
    for (long t = 0; t < T; t++) {
        float squares = 0, *row = sum + t * D;
#pragma omp simd reduction(+ : squares)
        for (long d = 0; d < D; d++) {
            float value = x[t * D + d] + (delta ? load(delta[t * D + d]) : 0.0f);
            row[d] = value;
            squares += value * value;
        }
        float scale = 1.0f / sqrtf(squares / D + eps);
#pragma omp simd
        for (long d = 0; d < D; d++)
            out[t * D + d] = store(load(weight[d]) * (row[d] * scale));
    }
}

/* gate_up [T, 2 I] → silu(gate) · up. */
void swiglu(const number *gate_up, number *out, long T, long I, int threads) {
#pragma omp parallel for num_threads(threads) if (T * I > WORTH_THREADS)
    for (long t = 0; t < T; t++) {
        const number *gate = gate_up + 2 * t * I, *up = gate + I;
#pragma omp simd
        for (long i = 0; i < I; i++) {
            float x = load(gate[i]);
            out[t * I + i] = store(x / (1.0f + exp_of(-x)) * load(up[i]));
        }
    }
}

/* Attention ------------------------------------------------------------------------------------------------------- */

typedef struct {
    long query_heads, kv_heads, size;
    const number *cos, *sin;             /* [position, size] */
    const number *query_norm, *key_norm; /* [size], or missing */
    float eps, scale;
    long window; /* keys that a query sees, itself included; 0: all */
} Attention;

/* One head: norm, if the model has one, then rotary embedding. */
INLINE void rotate(const number *in, number *out, const Attention *a, const number *norm, long position, long size) {
    float x[size];
    const number *cos = a->cos + position * size, *sin = a->sin + position * size;
    for (long d = 0; d < size; d++)
        x[d] = load(in[d]);
    if (norm) {
        float squares = 0;
#pragma omp simd reduction(+ : squares)
        for (long d = 0; d < size; d++)
            squares += x[d] * x[d];
        float scale = 1.0f / sqrtf(squares / size + a->eps);
        for (long d = 0; d < size; d++)
            x[d] = load(norm[d]) * (x[d] * scale);
    }
    long half = size / 2;
    for (long d = 0; d < half; d++) {
        out[d] = store(x[d] * load(cos[d]) - x[d + half] * load(sin[d]));
        out[d + half] = store(x[d + half] * load(cos[d + half]) + x[d] * load(sin[d + half]));
    }
}

/* The query heads of one key-value head of one row: each key and value is read once for all of them. */
INLINE void attend_group(const float *queries, const number *keys, const number *values, number *out, float *weights, long group, long first,
                         long end, float scale, long size) {
    long length = end - first;
    float sums[group], mixed[group * size], one[size];
    for (long p = 0; p < length; p++) {
        for (long d = 0; d < size; d++)
            one[d] = load(keys[(first + p) * size + d]);
        for (long g = 0; g < group; g++) {
            float dot = 0;
#pragma omp simd reduction(+ : dot)
            for (long d = 0; d < size; d++)
                dot += queries[g * size + d] * one[d];
            weights[g * length + p] = dot * scale;
        }
    }
    for (long g = 0; g < group; g++) {
        float *row = weights + g * length, most = row[0], total = 0;
#pragma omp simd reduction(max : most)
        for (long p = 0; p < length; p++)
            most = row[p] > most ? row[p] : most;
#pragma omp simd reduction(+ : total)
        for (long p = 0; p < length; p++) {
            row[p] = exp_of(row[p] - most);
            total += row[p];
        }
        sums[g] = total;
    }
    memset(mixed, 0, sizeof mixed);
    for (long p = 0; p < length; p++) {
        for (long d = 0; d < size; d++)
            one[d] = load(values[(first + p) * size + d]);
        for (long g = 0; g < group; g++)
            for (long d = 0; d < size; d++)
                mixed[g * size + d] += weights[g * length + p] * one[d];
    }
    for (long g = 0; g < group; g++)
        for (long d = 0; d < size; d++)
            out[g * size + d] = store(mixed[g * size + d] / sums[g]);
}

INLINE void write_head(const number *qkv, number *keys, number *values, const Attention *a, long head, long position, long size) {
    const number *key = qkv + (a->query_heads + head) * size, *value = key + a->kv_heads * size;
    rotate(key, keys + position * size, a, a->key_norm, position, size);
    memcpy(values + position * size, value, size * sizeof(number));
}

INLINE void attend_head(const number *qkv, number *out, const number *keys, const number *values, const Attention *a, long head, long position,
                        long size) {
    long group = a->query_heads / a->kv_heads;
    const number *query = qkv + head * group * size;
    float queries[group * size];
    for (long g = 0; g < group; g++) {
        number turned[size];
        rotate(query + g * size, turned, a, a->query_norm, position, size);
        for (long d = 0; d < size; d++)
            queries[g * size + d] = load(turned[d]);
    }
    long first = a->window && position + 1 > a->window ? position + 1 - a->window : 0;
    float *weights = malloc(group * (position + 1 - first) * sizeof(float));
    attend_group(queries, keys, values, out + head * group * size, weights, group, first, position + 1, a->scale, size);
    free(weights);
}

/* For each row's new token: rotary embedding of qkv [B, heads · size], its key and value to the cache, attention to all of the row's
   keys. Row b uses the block `blocks[b · blocks_stride]`; `memory` is the layer's part of block 0. Rows that share a block are drafts:
   each attends to the keys of those before it, so all keys are written first. A row at a negative position is unused. */
void rotate_and_attend(const number *qkv, number *out, number *memory, long block_stride, long block_tokens, const int *blocks,
                       long blocks_stride, const long *positions, long position_stride, const Attention *a, long B, int threads) {
    long size = a->size, kv_heads = a->kv_heads, width = (a->query_heads + 2 * kv_heads) * size;
#pragma omp parallel for num_threads(threads) collapse(2) if (B * width > WORTH_THREADS)
    for (long b = 0; b < B; b++)
        for (long head = 0; head < kv_heads; head++) {
            long position = positions[b * position_stride];
            number *keys = memory + blocks[b * blocks_stride] * block_stride + head * block_tokens * size;
            if (position >= 0)
                write_head(qkv + b * width, keys, keys + kv_heads * block_tokens * size, a, head, position, size);
        }
#pragma omp parallel for num_threads(threads) collapse(2) schedule(dynamic)
    for (long b = 0; b < B; b++)
        for (long head = 0; head < kv_heads; head++) {
            long position = positions[b * position_stride];
            number *row = out + b * a->query_heads * size;
            if (position < 0) {
                long group = a->query_heads / kv_heads;
                memset(row + head * group * size, 0, group * size * sizeof(number));
                continue;
            }
            const number *keys = memory + blocks[b * blocks_stride] * block_stride + head * block_tokens * size;
            const number *values = keys + kv_heads * block_tokens * size;
            if (size == 64)
                attend_head(qkv + b * width, row, keys, values, a, head, position, 64);
            else if (size == 128)
                attend_head(qkv + b * width, row, keys, values, a, head, position, 128);
            else
                attend_head(qkv + b * width, row, keys, values, a, head, position, size);
        }
}

/* Products -------------------------------------------------------------------------------------------------------- */

INLINE float total_of(vector v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float total = 0;
    for (int lane = 0; lane < LANES; lane++)
        total += v[lane];
    return total;
#endif
}

INLINE void tile(const float *x, const number *weight, const number *bias, number *out, float *logits, long I, long O,
                 int rows, int columns) {
    vector sums[TILE_ROWS][TILE_COLUMNS] = {0};
    for (long i = 0; i < I; i += LANES) {
        vector of_weight[TILE_COLUMNS];
        for (int column = 0; column < columns; column++) {
            of_weight[column] = load_vector(weight + column * I + i);
            __builtin_prefetch(weight + (columns + column) * I + i); /* the next tile's */
        }
        for (int row = 0; row < rows; row++) {
            vector of_x;
            memcpy(&of_x, x + row * I + i, sizeof of_x);
            for (int column = 0; column < columns; column++)
                sums[row][column] += of_x * of_weight[column];
        }
    }
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++) {
            float value = total_of(sums[row][column]) + (bias ? load(bias[column]) : 0.0f);
            if (logits)
                logits[row * O + column] = value;
            else
                out[row * O + column] = store(value);
        }
}

INLINE void column_tile(const float *x, const number *weight, const number *bias, number *out, float *logits, long T, long I, long O,
                        int columns) {
    long t = 0;
    for (; t + TILE_ROWS <= T; t += TILE_ROWS)
        tile(x + t * I, weight, bias, out + t * O, logits ? logits + t * O : 0, I, O, TILE_ROWS, columns);
    switch (T - t) { /* the rest as one tile, too: a second one would read the weights again */
#define REST(rows) case rows: tile(x + t * I, weight, bias, out + t * O, logits ? logits + t * O : 0, I, O, rows, columns); break;
        REST(1) REST(2) REST(3)
#if TILE_ROWS > 4
        REST(4) REST(5) REST(6) REST(7)
#endif
#undef REST
    }
}

/* out [T, O] = x [T, I] weight [O, I]ᵀ + bias (which may be missing), for few rows: the weights are read once, in the order they have.
   I is a multiple of LANES. `wide` holds T · I floats. With `logits`, the result goes there, in fp32, and not to `out`. */
void product(const number *x, const number *weight, const number *bias, number *out, float *logits, float *wide, long T, long I, long O,
             int threads) {
    for (long i = 0; i < T * I; i++)
        wide[i] = load(x[i]);
    long tiles = (O + TILE_COLUMNS - 1) / TILE_COLUMNS, chunk = 1 + tiles / (8 * threads);
#pragma omp parallel for num_threads(threads) schedule(dynamic, chunk)
    for (long n = 0; n < tiles; n++) {
        long o = n * TILE_COLUMNS;
        if (o + TILE_COLUMNS <= O)
            column_tile(wide, weight + o * I, bias ? bias + o : 0, out + o, logits ? logits + o : 0, T, I, O, TILE_COLUMNS);
        else
            for (; o < O; o++)
                column_tile(wide, weight + o * I, bias ? bias + o : 0, out + o, logits ? logits + o : 0, T, I, O, 1);
    }
}

/* Products with packed weights ------------------------------------------------------------------------------------ */

#define CHUNK 64 /* inputs that are summed before they are added to the rest: their rounding errors stay small */
#define LINE (64 / sizeof(number))

/* a0 b0 a1 b1 …, of the first or the second halves of a and b. */
#if LANES == 16
#define FIRST 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define SECOND 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif LANES == 8
#define FIRST 0, 8, 1, 9, 2, 10, 3, 11
#define SECOND 4, 12, 5, 13, 6, 14, 7, 15
#else
#define FIRST 0, 4, 1, 5
#define SECOND 2, 6, 3, 7
#endif
#ifdef __clang__
#define INTERLEAVED(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
typedef int32_t places __attribute__((vector_size(4 * LANES)));
#define INTERLEAVED(a, b, ...) __builtin_shuffle(a, b, (places){__VA_ARGS__})
#endif

/* A square of numbers, row by row, becomes its transpose: log2(LANES) times, its first rows are interleaved with its last ones. */
INLINE void transpose(vector *square) {
    for (int left = LANES; left > 1; left /= 2) {
        vector before[LANES];
        UNROLL for (int n = 0; n < LANES; n++) before[n] = square[n];
        UNROLL for (int n = 0; n < LANES / 2; n++) {
            square[2 * n] = INTERLEAVED(before[n], before[n + LANES / 2], FIRST);
            square[2 * n + 1] = INTERLEAVED(before[n], before[n + LANES / 2], SECOND);
        }
    }
}

/* Numbers `first` to `end` of `rows` rows [rows, I], at most LANES of both, as a square [numbers, rows]; what is missing is 0. */
INLINE void load_transposed(const number *from, vector *square, long rows, long I, long first, long end) {
    for (long row = 0; row < LANES; row++) {
        square[row] = (vector){0};
        if (row < rows && end - first == LANES)
            square[row] = load_vector(from + row * I + first);
        else if (row < rows)
            for (long i = first; i < end; i++)
                square[row][i - first] = load(from[row * I + i]);
    }
    transpose(square);
}

/* x [rows, I] → out [I, LANES] in fp32; rows that are missing are 0. */
INLINE void spread(const number *x, vector *out, long rows, long I) {
    for (long first = 0; first < I; first += LANES) {
        long end = first + LANES < I ? first + LANES : I;
        vector square[LANES];
        load_transposed(x, square, rows, I, first, end);
        memcpy(out + first, square, (end - first) * sizeof(vector));
    }
}

/* weight [O, I] → packed [O / COLUMNS, I, COLUMNS], with zeros for columns that are missing. */
void pack(const number *weight, number *packed, long I, long O, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (long o = 0; o < O; o += COLUMNS)
        for (long first = 0; first < I; first += LANES)
            for (long column = 0; column < COLUMNS; column += LANES) {
                long end = first + LANES < I ? first + LANES : I, width = COLUMNS - column < LANES ? COLUMNS - column : LANES;
                vector square[LANES];
                load_transposed(weight + (o + column) * I, square, O - o - column < width ? O - o - column : width, I, first, end);
                for (long i = first; i < end; i++)
                    for (long n = 0; n < width; n++)
                        packed[o * I + i * COLUMNS + column + n] = store(square[i - first][n]);
            }
}

/* out [T, O] = x [T, I] weight [O, I]ᵀ + bias (which may be missing), for few rows. A lane is a row, so that nothing is added up across
   lanes. `wide`: I floats for each of T rows, rounded up to vectors, at an address for vectors. With `logits`, the result goes there, in
   fp32, and not to `out`. */
void packed_product(const number *x, const number *packed, const number *bias, number *out, float *logits, float *wide, long T, long I, long O,
                    int threads) {
    long vectors = (T + LANES - 1) / LANES, blocks = (O + COLUMNS - 1) / COLUMNS, together = 1 + blocks / (8 * threads);
    for (long v = 0; v < vectors; v++)
        spread(x + v * LANES * I, (vector *)wide + v * I, T - v * LANES < LANES ? T - v * LANES : LANES, I);
#pragma omp parallel num_threads(threads)
    {
        vector total[vectors * COLUMNS + LANES]; /* the last columns are transposed with what follows them */
#pragma omp for schedule(dynamic, together)
        for (long block = 0; block < blocks; block++) {
            long o = block * COLUMNS, columns = o + COLUMNS < O ? COLUMNS : O - o;
            memset(total, 0, sizeof total);
            for (long i = 0; i < I; i += CHUNK) {
                long length = i + CHUNK < I ? CHUNK : I - i;
                const number *weights = packed + o * I + i * COLUMNS;
#ifdef BF16
                float w[CHUNK * COLUMNS];
                for (long n = 0; n < length * COLUMNS; n++)
                    w[n] = load(weights[n]);
#else
                const float *w = weights;
#endif
                for (long v = 0; v < vectors; v++) {
                    const vector *of_x = (const vector *)wide + v * I + i;
                    vector sums[COLUMNS];
                    UNROLL for (int column = 0; column < COLUMNS; column++) sums[column] = (vector){0};
                    for (long n = 0; n < length; n++) {
                        for (long ahead = 0; !v && ahead < COLUMNS; ahead += LINE)
                            __builtin_prefetch(weights + (n + 2 * CHUNK) * COLUMNS + ahead);
                        UNROLL for (int column = 0; column < COLUMNS; column++)
                            sums[column] += of_x[n] * w[n * COLUMNS + column];
                    }
                    UNROLL for (int column = 0; column < COLUMNS; column++) total[v * COLUMNS + column] += sums[column];
                }
            }
            for (long v = 0; v < vectors; v++)
                for (long c = 0; c < columns; c += LANES) {
                    vector square[LANES];
                    memcpy(square, total + v * COLUMNS + c, sizeof square);
                    transpose(square);
                    for (long row = 0; row < LANES && v * LANES + row < T; row++)
                        for (long column = c; column < columns && column < c + LANES; column++) {
                            float value = square[row][column - c] + (bias ? load(bias[o + column]) : 0.0f);
                            if (logits)
                                logits[(v * LANES + row) * O + o + column] = value;
                            else
                                out[(v * LANES + row) * O + o + column] = store(value);
                        }
                }
        }
    }
}

/* Drawing --------------------------------------------------------------------------------------------------------- */

/* log Σ exp of every tile of `tile` fp32 logits, [B, tiles]; a row's last tile may be smaller. */
void tile_sums(const float *logits, float *sums, long B, long V, long tile, int threads) {
    long tiles = (V + tile - 1) / tile;
#pragma omp parallel for num_threads(threads) collapse(2)
    for (long b = 0; b < B; b++)
        for (long t = 0; t < tiles; t++) {
            const float *some = logits + b * V + t * tile;
            long count = t + 1 < tiles ? tile : V - t * tile;
            float most = -INFINITY, total = 0;
#pragma omp simd reduction(max : most)
            for (long i = 0; i < count; i++)
                most = some[i] > most ? some[i] : most;
            float shift = isfinite(most) ? most : 0.0f;
#pragma omp simd reduction(+ : total)
            for (long i = 0; i < count; i++)
                total += some[i] - shift > -87.0f ? exp_of(some[i] - shift) : (some[i] != some[i] ? some[i] : 0.0f);
            sums[b * tiles + t] = most == INFINITY ? most : logf(total) + shift;
        }
}

int lanes(void) { return LANES; }
int columns(void) { return COLUMNS; }
