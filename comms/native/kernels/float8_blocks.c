/* Rows of float32 as float8 (e4m3, finite and NaN) with a power of two as the scale of each block of a row.
 *
 * The format, and its bound, are those of holdfast/comms/codecs/float8_blocks.py. Blocks begin at the first
 * element of a row. */

#define PY_SSIZE_T_CLEAN
#include "kernels/halves.h"
#include "module.h"

#include <float.h>
#include <stdint.h>
#include <string.h>

#define FLOAT8_LARGEST 448.0
#define FLOAT8_NAN 0x7f
#define INFINITE_BITS 0x7f800000u
#define LARGEST_BITS 0x43e00000u /* of 448 */
#define SIGN_BIT 0x80000000u
#define MOST_EXPONENT 250

/* 2**exponent, for -126 to 127. */
static inline float power_of_two(int exponent) { return float_of((uint32_t)(exponent + 127) << 23); }

/* 2**exponent as two factors, because it may be too large or too small for one. */
static inline void split_power(int exponent, float factors[2]) {
    int half = exponent >> 1;
    factors[0] = power_of_two(half);
    factors[1] = power_of_two(exponent - half);
}

/* The least exponent with 448 * 2**exponent >= `most`, a finite number; 0 for 0. */
static inline int block_exponent(float most) {
    double share = (double)most / FLOAT8_LARGEST;
    uint64_t bits;
    if (most == 0)
        return 0;
    memcpy(&bits, &share, sizeof bits);
    return (int)(bits >> 52) - 1023 + ((bits & (((uint64_t)1 << 52) - 1)) != 0);
}

/* Without a branch, for the sake of vector instructions. */
static inline uint32_t choose(int which, uint32_t yes, uint32_t no) {
    return no ^ ((no ^ yes) & -(uint32_t)which);
}

/* The code of a number, rounded to nearest even; 448 for larger ones. */
static inline uint32_t float8_code(float value) {
    const uint32_t magic = 141u << 23; /* adding it rounds a denormal of float8 to its last place */
    uint32_t bits = bits_of(value), sign = bits & SIGN_BIT;
    uint32_t size = bits ^ sign;
    size = size < LARGEST_BITS ? size : LARGEST_BITS;
    uint32_t denormal = bits_of(float_of(size) + float_of(magic)) - magic;
    uint32_t normal = (size + 0x7ffff + ((size >> 20) & 1) - (120u << 23)) >> 20;
    return choose(size < (121u << 23), denormal, normal) | sign >> 24;
}

/* `source` are the bits of float32. */
FOR_EACH_CPU static int float8_encode_block(const uint32_t *source, uint8_t *codes, int count) {
    uint32_t most = 0;
    float by[2];
    for (int i = 0; i < count; i++) {
        uint32_t size = source[i] & ~SIGN_BIT;
        size = choose(size < INFINITE_BITS, size, 0);
        most = size > most ? size : most;
    }
    int exponent = block_exponent(float_of(most));
    split_power(-exponent, by);
    for (int i = 0; i < count; i++) {
        uint32_t code = float8_code(float_of(source[i]) * by[0] * by[1]);
        codes[i] = (uint8_t)choose((source[i] & ~SIGN_BIT) < INFINITE_BITS, code, FLOAT8_NAN);
    }
    return exponent;
}

static void float8_numbers(float into[256]) {
    for (int code = 0; code < 256; code++) {
        int power = code >> 3 & 15, rest = code & 7;
        float size = power ? (float)(8 + rest) * power_of_two(power - 10) : (float)rest * power_of_two(-9);
        into[code] = (code & 127) == FLOAT8_NAN ? float_of(0x7fc00000u) : code & 128 ? -size : size;
    }
}

FOR_EACH_CPU static void float8_decode_block(const uint8_t *codes, float *into, int count, int exponent,
                                             const float numbers[256]) {
    float by[2];
    split_power(exponent, by);
    for (int i = 0; i < count; i++) {
        float value = numbers[codes[i]] * by[0] * by[1];
        value = value > FLT_MAX ? FLT_MAX : value;
        into[i] = value < -FLT_MAX ? -FLT_MAX : value;
    }
}

/* -- for Python */

static inline uint64_t blocks_in(uint64_t elements, uint64_t block) { return (elements + block - 1) / block; }

/* float8_encode(source, rows, row, block, codes, exponents): dense rows; all but the counts are addresses. */
PyObject *float8_encode(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    uint64_t a[6];
    if (!parse_numbers(args, count, 6, a) || !is_memory(a[0], a[1] * a[2]) || !is_memory(a[4], a[1] * a[2]) ||
        !is_memory(a[5], a[1] * a[2]))
        return NULL;
    uint64_t row = a[2], block = a[3] ? a[3] : 1, blocks = blocks_in(row, block);
    Py_BEGIN_ALLOW_THREADS;
    for (uint64_t at = 0; at < a[1]; at++)
        for (uint64_t number = 0; number < blocks; number++) {
            uint64_t first = number * block, left = row - first;
            ((int16_t *)(uintptr_t)a[5])[at * blocks + number] = (int16_t)float8_encode_block(
                (const uint32_t *)(uintptr_t)a[0] + at * row + first,
                (uint8_t *)(uintptr_t)a[4] + at * row + first, (int)(left < block ? left : block));
        }
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/* float8_decode(codes, exponents, rows, row, first, block, into, stride): rows that begin at element `first`
 * of their first block, into rows that are `stride` elements apart; the codes and exponents are dense. */
PyObject *float8_decode(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    uint64_t a[8];
    float numbers[256];
    if (!parse_numbers(args, count, 8, a) || !is_memory(a[0], a[2] * a[3]) || !is_memory(a[1], a[2] * a[3]) ||
        !is_memory(a[6], a[2] * a[3]))
        return NULL;
    uint64_t row = a[3], first = a[4], block = a[5] ? a[5] : 1, blocks = blocks_in(first + row, block);
    const int16_t *exponents = (const int16_t *)(uintptr_t)a[1];
    float8_numbers(numbers);
    Py_BEGIN_ALLOW_THREADS;
    for (uint64_t at = 0; at < a[2]; at++)
        for (uint64_t number = 0, done = 0; number < blocks; number++) {
            uint64_t end = (number + 1) * block - first;
            int exponent =
                exponents[at * blocks + number]; /* beyond these limits all but 0 are too large, or vanish */
            exponent = exponent < -MOST_EXPONENT  ? -MOST_EXPONENT
                       : exponent > MOST_EXPONENT ? MOST_EXPONENT
                                                  : exponent;
            end = end < row ? end : row;
            float8_decode_block((const uint8_t *)(uintptr_t)a[0] + at * row + done,
                                (float *)(uintptr_t)a[6] + at * a[7] + done, (int)(end - done), exponent,
                                numbers);
            done = end;
        }
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}
