#include "kernels/reductions.h"

#include "kernels/halves.h"

#define ELEMENTWISE(NAME, TYPE, EXPRESSION)                                                                  \
    FOR_EACH_CPU static void NAME(void *out_, const void *a_, const void *b_, size_t count) {                \
        TYPE *out = out_;                                                                                    \
        const TYPE *a = a_, *b = b_;                                                                         \
        INDEPENDENT for (size_t i = 0; i < count; i++) {                                                     \
            TYPE x = a[i], y = b[i];                                                                         \
            out[i] = (TYPE)(EXPRESSION);                                                                     \
        }                                                                                                    \
    }

#define ORDERED(NAME, TYPE)                                                                                  \
    ELEMENTWISE(NAME##_sum, TYPE, x + y)                                                                     \
    ELEMENTWISE(NAME##_product, TYPE, x *y)                                                                  \
    ELEMENTWISE(NAME##_min, TYPE, (x < y) | (x != x) ? x : y)                                                \
    ELEMENTWISE(NAME##_max, TYPE, (x > y) | (x != x) ? x : y)

#define INTEGERS(NAME, TYPE, UNSIGNED)                                                                       \
    ELEMENTWISE(NAME##_sum, TYPE, (UNSIGNED)x + (UNSIGNED)y)                                                 \
    ELEMENTWISE(NAME##_product, TYPE, (UNSIGNED)((uint64_t)x * (uint64_t)y))                                 \
    ELEMENTWISE(NAME##_min, TYPE, x < y ? x : y)                                                             \
    ELEMENTWISE(NAME##_max, TYPE, x > y ? x : y)                                                             \
    ELEMENTWISE(NAME##_band, TYPE, x &y)                                                                     \
    ELEMENTWISE(NAME##_bor, TYPE, x | y)                                                                     \
    ELEMENTWISE(NAME##_bxor, TYPE, x ^ y)

#define SHORT_FLOATS(NAME, FROM, TO)                                                                         \
    ELEMENTWISE(NAME##_sum, uint16_t, TO(FROM(x) + FROM(y)))                                                 \
    ELEMENTWISE(NAME##_product, uint16_t, TO(FROM(x) * FROM(y)))                                             \
    ELEMENTWISE(NAME##_min, uint16_t, (FROM(x) < FROM(y)) | (FROM(x) != FROM(x)) ? x : y)                    \
    ELEMENTWISE(NAME##_max, uint16_t, (FROM(x) > FROM(y)) | (FROM(x) != FROM(x)) ? x : y)

#define COMPLEX(NAME, PART, SUM_OF_PARTS)                                                                    \
    static void NAME##_sum(void *out, const void *a, const void *b, size_t count) {                          \
        SUM_OF_PARTS(out, a, b, 2 * count);                                                                  \
    }                                                                                                        \
    FOR_EACH_CPU static void NAME##_product(void *out_, const void *a_, const void *b_, size_t count) {      \
        PART *out = out_;                                                                                    \
        const PART *a = a_, *b = b_;                                                                         \
        INDEPENDENT for (size_t i = 0; i < count; i++) {                                                     \
            PART real = a[2 * i] * b[2 * i] - a[2 * i + 1] * b[2 * i + 1];                                   \
            PART imaginary = a[2 * i] * b[2 * i + 1] + a[2 * i + 1] * b[2 * i];                              \
            out[2 * i] = real;                                                                               \
            out[2 * i + 1] = imaginary;                                                                      \
        }                                                                                                    \
    }

ELEMENTWISE(bool_or, uint8_t, x | y)
ELEMENTWISE(bool_and, uint8_t, x &y)
ELEMENTWISE(bool_xor, uint8_t, x ^ y)
INTEGERS(u8, uint8_t, uint8_t)
INTEGERS(i8, int8_t, uint8_t)
INTEGERS(u16, uint16_t, uint16_t)
INTEGERS(i16, int16_t, uint16_t)
INTEGERS(u32, uint32_t, uint32_t)
INTEGERS(i32, int32_t, uint32_t)
INTEGERS(u64, uint64_t, uint64_t)
INTEGERS(i64, int64_t, uint64_t)
ORDERED(f32, float)
ORDERED(f64, double)
SHORT_FLOATS(plain_f16, from_half, to_half)
SHORT_FLOATS(bf16, from_bf16, to_bf16)
COMPLEX(c64, float, f32_sum)
COMPLEX(c128, double, f64_sum)

#define CONVERSIONS(NAME, FROM, TO, LINKAGE)                                                                 \
    FOR_EACH_CPU LINKAGE const float *NAME##_widen(float *into, const uint16_t *from, size_t count) {        \
        INDEPENDENT for (size_t i = 0; i < count; i++) into[i] = FROM(from[i]);                              \
        return into;                                                                                         \
    }                                                                                                        \
    FOR_EACH_CPU LINKAGE void NAME##_narrow(uint16_t *into, const float *from, size_t count) {               \
        INDEPENDENT for (size_t i = 0; i < count; i++) into[i] = TO(from[i]);                                \
    }

CONVERSIONS(plain_f16, from_half, to_half, static)
CONVERSIONS(bf16, from_bf16, to_bf16, )

/* Half precision by x86's own instructions: several times as fast. */
#if defined(__x86_64__)
#include <immintrin.h>

#define WITH_HALVES __attribute__((target("avx,f16c")))

WITH_HALVES static size_t fast_f16_widen(float *into, const uint16_t *from, size_t count) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(into + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    return i;
}

WITH_HALVES static size_t fast_f16_narrow(uint16_t *into, const float *from, size_t count) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128((__m128i *)(into + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    return i;
}

const float *f16_widen(float *into, const uint16_t *from, size_t count) {
    size_t done = __builtin_cpu_supports("f16c") ? fast_f16_widen(into, from, count) : 0;
    plain_f16_widen(into + done, from + done, count - done);
    return into;
}

void f16_narrow(uint16_t *into, const float *from, size_t count) {
    size_t done = __builtin_cpu_supports("f16c") ? fast_f16_narrow(into, from, count) : 0;
    plain_f16_narrow(into + done, from + done, count - done);
}

#define HALVES(OP, RESULT)                                                                                   \
    WITH_HALVES static void fast_f16_##OP(void *out_, const void *a_, const void *b_, size_t count) {        \
        uint16_t *out = out_;                                                                                \
        const uint16_t *a = a_, *b = b_;                                                                     \
        size_t i = 0;                                                                                        \
        for (; i + 8 <= count; i += 8) {                                                                     \
            __m256 x = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(a + i)));                           \
            __m256 y = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(b + i)));                           \
            _mm_storeu_si128((__m128i *)(out + i), _mm256_cvtps_ph(RESULT, _MM_FROUND_TO_NEAREST_INT));      \
        }                                                                                                    \
        plain_f16_##OP(out + i, a + i, b + i, count - i);                                                    \
    }                                                                                                        \
    static void f16_##OP(void *out, const void *a, const void *b, size_t count) {                            \
        (__builtin_cpu_supports("f16c") ? fast_f16_##OP : plain_f16_##OP)(out, a, b, count);                 \
    }
#define UNLESS_NAN(VALUE) _mm256_blendv_ps(VALUE, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q))

HALVES(sum, _mm256_add_ps(x, y))
HALVES(product, _mm256_mul_ps(x, y))
HALVES(min, UNLESS_NAN(_mm256_min_ps(x, y)))
HALVES(max, UNLESS_NAN(_mm256_max_ps(x, y)))
#define F16_ROW FLOAT_ROW(f16)
#else
const float *f16_widen(float *into, const uint16_t *from, size_t count) {
    return plain_f16_widen(into, from, count);
}

void f16_narrow(uint16_t *into, const float *from, size_t count) { plain_f16_narrow(into, from, count); }

#define F16_ROW FLOAT_ROW(plain_f16)
#endif

#define OPS 7
#define INTEGER_ROW(NAME)                                                                                    \
    {NAME##_sum, NAME##_product, NAME##_min, NAME##_max, NAME##_band, NAME##_bor, NAME##_bxor}
#define FLOAT_ROW(NAME) {NAME##_sum, NAME##_product, NAME##_min, NAME##_max}
#define COMPLEX_ROW(NAME) {NAME##_sum, NAME##_product}

typedef struct {
    const char *dtype;
    size_t itemsize;
    kernel ops[OPS]; /* in the order of op_names; NULL: no such reduction */
} kernels;

static const char *const op_names[OPS] = {"sum", "product", "min", "max", "band", "bor", "bxor"};

static const kernels all_kernels[] = {
    {"bool", 1, {bool_or, bool_and, bool_and, bool_or, bool_and, bool_or, bool_xor}},
    {"uint8", 1, INTEGER_ROW(u8)},
    {"int8", 1, INTEGER_ROW(i8)},
    {"uint16", 2, INTEGER_ROW(u16)},
    {"int16", 2, INTEGER_ROW(i16)},
    {"uint32", 4, INTEGER_ROW(u32)},
    {"int32", 4, INTEGER_ROW(i32)},
    {"uint64", 8, INTEGER_ROW(u64)},
    {"int64", 8, INTEGER_ROW(i64)},
    {"float32", 4, FLOAT_ROW(f32)},
    {"float64", 8, FLOAT_ROW(f64)},
    {"float16", 2, F16_ROW},
    {"bfloat16", 2, FLOAT_ROW(bf16)},
    {"complex64", 8, COMPLEX_ROW(c64)},
    {"complex128", 16, COMPLEX_ROW(c128)},
};
#define DTYPES ((long)(sizeof all_kernels / sizeof all_kernels[0]))

kernel kernel_of(long kind) {
    return kind < 0 || kind >= DTYPES * OPS ? NULL : all_kernels[kind / OPS].ops[kind % OPS];
}

size_t itemsize_of(long kind) { return all_kernels[kind / OPS].itemsize; }

long kind_of(const char *dtype, const char *op) {
    for (long row = 0; row < DTYPES; row++)
        for (long column = 0; column < OPS; column++)
            if (!strcmp(all_kernels[row].dtype, dtype) && !strcmp(op_names[column], op) &&
                all_kernels[row].ops[column])
                return row * OPS + column;
    return -1;
}
