/* The correctly rounded sum of several blocks, elementwise, where one or two doubles hold the sum exactly:
 * the compiled part of holdfast/comms/reproducible.py. That holds for nearly all numbers; Python computes
 * the others.
 *
 * One double suffices for a chunk with numbers that span, from the last digit of the smallest to the first of
 * the largest, at most its 53 bits, including those for carries: floats of 24 bits that differ by a factor of
 * less than 2^27. These are simply added. Two doubles use D. Knuth's TwoSum, cascaded twice. A result that is
 * rounded again is first rounded to odd (S. Boldo, G. Melquiond, 2008). */

#define PY_SSIZE_T_CLEAN
#include "kernels/halves.h"
#include "module.h"

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

/* Masks, so that loops are vectorized: all ones unless `bits` are those of a zero of either sign. */
static inline uint64_t unless_zero(uint64_t bits) { return -(uint64_t)((bits << 1) != 0); }

/* value + rest, where `value` is the nearest double: rounded to the odd neighbour. */
static inline double odd(double value, double rest) {
    uint64_t bits = bits_of_double(value), others = bits_of_double(rest);
    uint64_t outwards = 1 - 2 * ((bits ^ others) >> 63);
    return double_of(bits + (outwards & unless_zero(others) & ((bits & 1) - 1)));
}

/* `value` as a float, rounded to the odd neighbour unless it is a float itself. */
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
        uint64_t carried =
            unless_zero(bits_of_double(c)); /* a negative zero must stay one: nothing is added to it */
        total = double_of((bits_of_double(total) & carried) | (bits_of_double(s) & ~carried));
        beyond |= -(uint64_t)((bits_of_double(total) & 0x7ff0000000000000u) == 0x7ff0000000000000u);
        sum[i] = odd(total, rest);
    }
    return beyond;
}

FOR_EACH_CPU static void add_floats(double *sum, const float *terms, size_t count) {
    INDEPENDENT for (size_t i = 0; i < count; i++) sum[i] += (double)terms[i];
}

FOR_EACH_CPU static void take_floats(double *sum, const float *terms, size_t count) {
    INDEPENDENT for (size_t i = 0; i < count; i++) sum[i] = (double)terms[i];
}

FOR_EACH_CPU static void round_to_floats(float *into, const double *sum, size_t count) {
    INDEPENDENT for (size_t i = 0; i < count; i++) into[i] = (float)sum[i];
}

/* Round to odd after 20 binary digits: that rounds to fewer digits as `sum` does. */
FOR_EACH_CPU static void cut_to_floats(float *into, const double *sum, size_t count) {
    INDEPENDENT for (size_t i = 0; i < count; i++) {
        uint64_t bits = bits_of_double(sum[i]);
        uint64_t rest = (bits & 0xffffffffu) + 0xffffffffu;
        into[i] = (float)double_of((bits | (rest & (1ull << 32))) & ~0xffffffffull);
    }
}

/* `lowest`: one less than the smallest of the bit patterns, so that zeros count as the greatest. */
#define EXTREMES(BITS)                                                                                       \
    FOR_EACH_CPU static void extremes_##BITS(const uint##BITS##_t *from, size_t count,                       \
                                             uint##BITS##_t *lowest, uint##BITS##_t *highest) {              \
        const uint##BITS##_t unsigned_ = (uint##BITS##_t) ~0ull >> 1;                                        \
        uint##BITS##_t low = *lowest, high = *highest;                                                       \
        for (size_t i = 0; i < count; i++) {                                                                 \
            uint##BITS##_t bits = from[i] & unsigned_, below = bits - 1;                                     \
            low = below < low ? below : low, high = bits > high ? bits : high;                               \
        }                                                                                                    \
        *lowest = low, *highest = high;                                                                      \
    }

EXTREMES(16)
EXTREMES(32)

/* NAME_plainly: add a chunk in one double if that is exact; whether it was. NUMBERS of BITS bits have DIGITS
 * binary digits. */
#define PLAINLY(NAME, TYPE, BITS, DIGITS, WIDEN, CUT, NARROW)                                                \
    static int NAME##_plainly(TYPE *out, const void *const *inputs, size_t number, size_t at,                \
                              size_t count) {                                                                \
        uint##BITS##_t lowest = (uint##BITS##_t) ~0ull, highest = 0;                                         \
        for (size_t i = 0; i < number; i++)                                                                  \
            extremes_##BITS((const uint##BITS##_t *)inputs[i] + at, count, &lowest, &highest);               \
        const int exponents = (1 << (BITS - DIGITS)) - 1;                                                    \
        int low = (uint##BITS##_t)(lowest + 1) >> (DIGITS - 1), high = highest >> (DIGITS - 1), carries = 0; \
        while (((size_t)1 << carries) < number)                                                              \
            carries++;                                                                                       \
        if (high == exponents || high - (low ? low : 1) + DIGITS + carries > 53)                             \
            return 0;                                                                                        \
        double sum[CHUNK];                                                                                   \
        float floats[CHUNK];                                                                                 \
        for (size_t i = 0; i < number; i++)                                                                  \
            (i ? add_floats : take_floats)(sum, WIDEN(floats, (const TYPE *)inputs[i] + at, count), count);  \
        float *rounded = sizeof(TYPE) == sizeof(float) ? (float *)out + at : floats;                         \
        CUT(rounded, sum, count);                                                                            \
        NARROW(out + at, rounded, count);                                                                    \
        return 1;                                                                                            \
    }

static inline const float *as_they_are(float *room, const float *from, size_t count) {
    (void)room, (void)count;
    return from;
}

static inline void rounded_already(float *into, const float *from, size_t count) {
    (void)into, (void)from, (void)count;
}

PLAINLY(f32, float, 32, 24, as_they_are, round_to_floats, rounded_already)
PLAINLY(bf16, uint16_t, 16, 8, bf16_widen, cut_to_floats, bf16_narrow)
PLAINLY(f16, uint16_t, 16, 11, f16_widen, cut_to_floats, f16_narrow)
#define f64_plainly(out, inputs, number, at, count) 0

#define EXACT(NAME, TYPE, LOAD, STORE, ROUNDED_AGAIN)                                                        \
    FOR_EACH_CPU static void NAME##_load(double *into, const TYPE *from, size_t count) {                     \
        INDEPENDENT for (size_t i = 0; i < count; i++) into[i] = (double)LOAD(from[i]);                      \
    }                                                                                                        \
    FOR_EACH_CPU static void NAME##_store(TYPE *into, const double *from, size_t count) {                    \
        INDEPENDENT for (size_t i = 0; i < count; i++) into[i] = STORE(from[i]);                             \
    }                                                                                                        \
    static size_t NAME##_sum_exactly(void *out, const void *const *inputs, size_t number, size_t count) {    \
        double sum[CHUNK] = {0}, carry[CHUNK], term[CHUNK] = {0};                                            \
        size_t done = 0;                                                                                     \
        for (; done < count; done += CHUNK) {                                                                \
            size_t here = count - done < CHUNK ? count - done : CHUNK;                                       \
            uint64_t failed = 0;                                                                             \
            if (NAME##_plainly(out, inputs, number, done, here))                                             \
                continue;                                                                                    \
            memset(carry, 0, sizeof carry);                                                                  \
            NAME##_load(sum, (const TYPE *)inputs[0] + done, here);                                          \
            for (size_t i = 1; i < number; i++) {                                                            \
                NAME##_load(term, (const TYPE *)inputs[i] + done, here);                                     \
                failed |= add_chunk(sum, carry, term);                                                       \
            }                                                                                                \
            if (failed | settle(sum, carry, ROUNDED_AGAIN))                                                  \
                return done;                                                                                 \
            NAME##_store((TYPE *)out + done, sum, here);                                                     \
        }                                                                                                    \
        return count;                                                                                        \
    }

#define AS_IT_IS(x) (x)
#define TO_FLOAT(x) ((float)(x))
#define TO_BF16(x) to_bf16(odd_float(x))
#define TO_HALF(x) to_half(odd_float(x))

EXACT(f64, double, AS_IT_IS, AS_IT_IS, 0)
EXACT(f32, float, AS_IT_IS, TO_FLOAT, 1)
EXACT(bf16, uint16_t, from_bf16, TO_BF16, 1)
EXACT(f16, uint16_t, from_half, TO_HALF, 1)

/* Replace every NaN by the one that torch makes. */
#define NANS(NAME, TYPE, UNSIGNED, INFINITE, THE_NAN)                                                        \
    FOR_EACH_CPU static int NAME##_has_nan(const TYPE *numbers, size_t count) {                              \
        TYPE found = 0;                                                                                      \
        for (size_t i = 0; i < count; i++)                                                                   \
            found |= (TYPE) - ((TYPE)(numbers[i] & UNSIGNED) > INFINITE);                                    \
        return found != 0;                                                                                   \
    }                                                                                                        \
    static void NAME##_make_nans_alike(void *numbers_, size_t count) {                                       \
        TYPE *numbers = numbers_;                                                                            \
        for (size_t done = 0; done < count; done += CHUNK) {                                                 \
            size_t here = count - done < CHUNK ? count - done : CHUNK;                                       \
            if (NAME##_has_nan(numbers + done, here))                                                        \
                for (size_t i = done; i < done + here; i++)                                                  \
                    if ((TYPE)(numbers[i] & UNSIGNED) > INFINITE)                                            \
                        numbers[i] = THE_NAN;                                                                \
        }                                                                                                    \
    }

NANS(f64, int64_t, INT64_MAX, 0x7ff0000000000000, 0x7ff8000000000000)
NANS(f32, int32_t, INT32_MAX, 0x7f800000, 0x7fc00000)
NANS(bf16, int16_t, INT16_MAX, 0x7f80, 0x7fc0)
NANS(f16, int16_t, INT16_MAX, 0x7c00, 0x7e00)

typedef size_t (*exact)(void *out, const void *const *inputs, size_t number, size_t count);

typedef struct {
    const char *dtype;
    exact sum_exactly;
    void (*make_nans_alike)(void *numbers, size_t count);
} floats;

#define FLOATS(DTYPE, NAME) {DTYPE, NAME##_sum_exactly, NAME##_make_nans_alike}

static const floats all_floats[] = {
    FLOATS("float32", f32),
    FLOATS("float64", f64),
    FLOATS("bfloat16", bf16),
    FLOATS("float16", f16),
};

static inline const floats *floats_of(const char *dtype) {
    for (size_t i = 0; i < sizeof all_floats / sizeof all_floats[0]; i++)
        if (!strcmp(dtype, all_floats[i].dtype))
            return &all_floats[i];
    return NULL;
}

/* -- functions of Python */

#define MOST_INPUTS 256

/* sum_exactly(dtype, out, count, inputs): the correctly rounded sums of the numbers at several addresses.
 * Returns how many were computed: it stops before a chunk that needs more than two doubles, or has a number
 * that is not finite. */
PyObject *sum_exactly(PyObject *module, PyObject *args) {
    (void)module;
    const char *dtype;
    unsigned long long out, count;
    PyObject *addresses;
    const void *inputs[MOST_INPUTS];
    if (!PyArg_ParseTuple(args, "sKKO!", &dtype, &out, &count, &PyTuple_Type, &addresses))
        return NULL;
    Py_ssize_t number = PyTuple_Size(addresses);
    const floats *kind = floats_of(dtype);
    if (!kind || number < 1 || number > MOST_INPUTS) {
        PyErr_SetString(PyExc_ValueError, "sum_exactly adds 1 to 256 inputs of a floating-point dtype");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < number; i++) {
        inputs[i] = PyLong_AsVoidPtr(PyTuple_GetItem(addresses, i));
        if (PyErr_Occurred() || !is_memory((uintptr_t)inputs[i], count))
            return NULL;
    }
    if (!is_memory(out, count))
        return NULL;
    size_t done;
    Py_BEGIN_ALLOW_THREADS;
    done = kind->sum_exactly((void *)(uintptr_t)out, inputs, (size_t)number, count);
    Py_END_ALLOW_THREADS;
    return PyLong_FromSize_t(done);
}

/* make_nans_alike(dtype, address, count): replace every NaN by torch's own. */
PyObject *make_nans_alike(PyObject *module, PyObject *args) {
    (void)module;
    const char *dtype;
    unsigned long long address, count;
    if (!PyArg_ParseTuple(args, "sKK", &dtype, &address, &count))
        return NULL;
    const floats *kind = floats_of(dtype);
    if (!kind) {
        PyErr_SetString(PyExc_ValueError, "make_nans_alike takes a floating-point dtype");
        return NULL;
    }
    if (!is_memory(address, count))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    kind->make_nans_alike((void *)(uintptr_t)address, count);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}
