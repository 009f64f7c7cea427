/* 16-bit floats as 32-bit floats and back, rounded to nearest even, and how kernels are compiled for several
 * CPUs. */

#ifndef HOLDFAST_HALVES_H
#define HOLDFAST_HALVES_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__gnu_linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default"), optimize("O3")))
#else
#define FOR_EACH_CPU
#endif
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline float from_bf16(uint16_t half) { return float_of((uint32_t)half << 16); }

static inline uint16_t to_bf16(float value) {
    uint32_t bits = bits_of(value);
    uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return (uint16_t)(value != value ? 0x7fc0u : rounded);
}

/* Half precision after F. Giesen, "half_to_float_fast" and "float_to_half_fast3_rtne" (public domain,
 * 2012-2016). */
static inline float from_half(uint16_t half) {
    const uint32_t all_ones = 0x7c00u << 13;
    uint32_t bits = (half & 0x7fffu) << 13;
    uint32_t exponent = bits & all_ones;
    bits += (127u - 15u) << 23;
    uint32_t special = bits + ((128u - 16u) << 23);
    uint32_t denormal = bits_of(float_of(bits + (1u << 23)) - float_of(113u << 23));
    bits = exponent == all_ones ? special : exponent == 0 ? denormal : bits;
    return float_of(bits | (half & 0x8000u) << 16);
}

static inline uint16_t to_half(float value) {
    const uint32_t infinity = 255u << 23, too_large = (127u + 16u) << 23,
                   magic = ((127u - 15u) + (23u - 10u) + 1u) << 23;
    uint32_t bits = bits_of(value), sign = bits & 0x80000000u;
    bits ^= sign;
    uint32_t overflow = bits > infinity ? 0x7e00u : 0x7c00u;
    uint32_t denormal = bits_of(float_of(bits) + float_of(magic)) - magic;
    uint32_t normal = (bits + ((uint32_t)(15 - 127) << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
    uint32_t half = bits >= too_large ? overflow : bits < (113u << 23) ? denormal : normal;
    return (uint16_t)(half | sign >> 16);
}

/* Many at once, by the instructions of the CPU that it runs on. */
const float *f16_widen(float *into, const uint16_t *from, size_t count);
void f16_narrow(uint16_t *into, const float *from, size_t count);
const float *bf16_widen(float *into, const uint16_t *from, size_t count);
void bf16_narrow(uint16_t *into, const float *from, size_t count);

#endif
