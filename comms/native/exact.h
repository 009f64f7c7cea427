/* The correctly rounded sum of several blocks, elementwise: what holdfast/comms/exact_sum.py computes, where two partial
 * sums in double precision hold it exactly. That is so for nearly all numbers; the others are left to Python.
 *
 * D. Knuth's TwoSum, cascaded twice; the last digit of what is rounded again is made odd (S. Boldo, G. Melquiond, 2008). */

#ifndef HOLDFAST_EXACT_H
#define HOLDFAST_EXACT_H

#include "kernels.h"

#define CHUNK 1024

static inline uint64_t bits_of_double(double value) {
    uint64_t bits;
    memcpy(&bits, &value, 8);
    return bits;
}

static inline double double_of(uint64_t bits) {
    double value;
    memcpy(&value, &bits, 8);
    return value;
}

/* All ones where `bits` are those of a number other than zero, or of neither zero: masks, so that loops are vectorized. */
static inline uint64_t unless_zero(uint64_t bits) { return -(uint64_t)((bits << 1) != 0); }

/* value + rest, of which `value` is the nearest double: the one of its two neighbours that is odd. */
static inline double odd(double value, double rest) {
    uint64_t bits = bits_of_double(value), others = bits_of_double(rest);
    uint64_t outwards = 1 - 2 * ((bits ^ others) >> 63);
    return double_of(bits + (outwards & unless_zero(others) & ((bits & 1) - 1)));
}

/* `value` as a float: one of the two neighbours that is odd, unless it is a float itself. */
static inline float odd_float(double value) {
    float nearest = (float)value;
    uint32_t bits = bits_of(nearest);
    double rest = value - (double)nearest;
    uint64_t others = bits_of_double(rest);
    uint64_t outwards = 1 - 2 * ((bits_of_double(value) ^ others) >> 63);
    uint32_t step = (uint32_t)(outwards & unless_zero(others));
    return float_of(bits + (step & ((bits & 1) - 1)));
}

FOR_EACH_CPU static uint64_t add_chunk(double *sum, double *carry, const double *term) {
    uint64_t lost = 0;
    INDEPENDENT for (size_t i = 0; i < CHUNK; i++) {
        double s = sum[i], c = carry[i], a = term[i];
        double total = s + a, back = total - s;
        double error = (s - (total - back)) + (a - back);
        double kept = c + error, again = kept - c;
        double dropped = (c - (kept - again)) + (error - again);
        sum[i] = total, carry[i] = kept;
        lost |= bits_of_double(dropped) << 1;
    }
    return lost;
}

FOR_EACH_CPU static uint64_t settle(double *sum, const double *carry, int rounded_again) {
    uint64_t beyond = 0;
    double again = rounded_again;
    INDEPENDENT for (size_t i = 0; i < CHUNK; i++) {
        double s = sum[i], c = carry[i];
        double total = s + c, back = total - s;
        double rest = ((s - (total - back)) + (c - back)) * again;
        uint64_t carried = unless_zero(bits_of_double(c)); /* a zero may be negative: then nothing is added to it */
        total = double_of((bits_of_double(total) & carried) | (bits_of_double(s) & ~carried));
        beyond |= -(uint64_t)((bits_of_double(total) & 0x7ff0000000000000u) == 0x7ff0000000000000u);
        sum[i] = odd(total, rest);
    }
    return beyond;
}

#define EXACT(NAME, TYPE, LOAD, STORE, ROUNDED_AGAIN)                                                                  \
    FOR_EACH_CPU static void NAME##_load(double *into, const TYPE *from, size_t count) {                               \
        INDEPENDENT for (size_t i = 0; i < count; i++) into[i] = (double)LOAD(from[i]);                                \
    }                                                                                                                  \
    FOR_EACH_CPU static void NAME##_store(TYPE *into, const double *from, size_t count) {                              \
        INDEPENDENT for (size_t i = 0; i < count; i++) into[i] = STORE(from[i]);                                       \
    }                                                                                                                  \
    static size_t NAME##_sum_exactly(void *out, const void *const *inputs, size_t number, size_t count) {              \
        double sum[CHUNK] = {0}, carry[CHUNK], term[CHUNK] = {0};                                                      \
        size_t done = 0;                                                                                               \
        for (; done < count; done += CHUNK) {                                                                          \
            size_t here = count - done < CHUNK ? count - done : CHUNK;                                                 \
            uint64_t failed = 0;                                                                                       \
            memset(carry, 0, sizeof carry);                                                                            \
            NAME##_load(sum, (const TYPE *)inputs[0] + done, here);                                                    \
            for (size_t i = 1; i < number; i++) {                                                                      \
                NAME##_load(term, (const TYPE *)inputs[i] + done, here);                                               \
                failed |= add_chunk(sum, carry, term);                                                                 \
            }                                                                                                          \
            if (failed | settle(sum, carry, ROUNDED_AGAIN))                                                            \
                return done;                                                                                           \
            NAME##_store((TYPE *)out + done, sum, here);                                                               \
        }                                                                                                              \
        return count;                                                                                                  \
    }

#define AS_IT_IS(x) (x)
#define TO_FLOAT(x) ((float)(x))
#define TO_BF16(x) to_bf16(odd_float(x))
#define TO_HALF(x) to_half(odd_float(x))

EXACT(f64, double, AS_IT_IS, AS_IT_IS, 0)
EXACT(f32, float, AS_IT_IS, TO_FLOAT, 1)
EXACT(bf16, uint16_t, from_bf16, TO_BF16, 1)
EXACT(f16, uint16_t, from_half, TO_HALF, 1)

typedef size_t (*exact)(void *out, const void *const *inputs, size_t number, size_t count);

static inline exact exact_of(const char *dtype) {
    return !strcmp(dtype, "float32")    ? f32_sum_exactly
           : !strcmp(dtype, "float64")  ? f64_sum_exactly
           : !strcmp(dtype, "bfloat16") ? bf16_sum_exactly
           : !strcmp(dtype, "float16")  ? f16_sum_exactly
                                        : NULL;
}

#endif
