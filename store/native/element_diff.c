#define PY_SSIZE_T_CLEAN
#include "element_diff.h"

#include <Python.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "arguments.h"
#include "digest_copy.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define DIFF_BLOCK 65536
#define DIFF_GROUP 64 /* elements that are compared at once */
#define LAST_BIT ((uint64_t)1 << 63)
#define DIFF_SLACK                                                                                           \
    (2 * DIFF_BLOCK + 64) /* bytes that a record may overrun its limit by, before it is given up */
#define TOO_MANY_CHANGES 0xffffffffu

/* A piece of the two memories: addresses, and `itemsize` bytes of an element: 1, 2, 4 or 8. */
typedef struct {
    uint64_t base, changed, nbytes, itemsize;
} diff_piece;

/* A piece to make from `base` at `into` (which may be `base`) with a record of `size` bytes: none, if that is
 * 0. */
typedef struct {
    uint64_t base, into, nbytes, itemsize, record, size;
} patch_piece;

static inline uint64_t to_eight(uint64_t nbytes) { return (nbytes + 7) & ~(uint64_t)7; }

static inline uint64_t blocks_of(uint64_t elements) { return (elements + DIFF_BLOCK - 1) / DIFF_BLOCK; }

static inline uint64_t record_bytes(uint64_t blocks, uint64_t changes, uint64_t itemsize) {
    return to_eight(4 * blocks) + to_eight(2 * changes) + to_eight(itemsize * changes);
}

/* -- which of 64 elements differ, as a mask */

typedef uint64_t (*group_diff)(const uint8_t *a, const uint8_t *b);

#define PORTABLE_GROUP(BITS)                                                                                 \
    static uint64_t differ_##BITS(const uint8_t *a, const uint8_t *b) {                                      \
        uint##BITS##_t left[DIFF_GROUP], right[DIFF_GROUP];                                                  \
        uint64_t mask = 0;                                                                                   \
        if (!memcmp(a, b, sizeof left))                                                                      \
            return 0;                                                                                        \
        memcpy(left, a, sizeof left);                                                                        \
        memcpy(right, b, sizeof right);                                                                      \
        for (int i = 0; i < DIFF_GROUP; i++)                                                                 \
            mask |= (uint64_t)(left[i] != right[i]) << i;                                                    \
        return mask;                                                                                         \
    }

PORTABLE_GROUP(8)
PORTABLE_GROUP(16)
PORTABLE_GROUP(32)
PORTABLE_GROUP(64)

/* Writes the places of all differing elements of a block to `places`; returns how many there are. */
typedef size_t (*block_diff)(const uint8_t *a, const uint8_t *b, size_t elements, uint8_t *places);

static inline __attribute__((always_inline)) uint8_t *put_place(uint8_t *places, size_t place) {
    uint16_t bits = (uint16_t)place;
    memcpy(places, &bits, 2);
    return places + 2;
}

static inline __attribute__((always_inline)) size_t diff_block_with(group_diff differ, size_t itemsize,
                                                                    const uint8_t *a, const uint8_t *b,
                                                                    size_t elements, uint8_t *places) {
    uint8_t *end = places;
    size_t done = 0;
    for (; done + DIFF_GROUP <= elements;
         done += DIFF_GROUP, a += DIFF_GROUP * itemsize, b += DIFF_GROUP * itemsize) {
        uint64_t mask = differ(a, b);
        uint8_t *next = end + 2 * __builtin_popcountll(mask);
        do { /* four at a time, wanted or not: a branch for each would often be mispredicted */
            for (int i = 0; i < 4; i++, mask &= mask - 1)
                end = put_place(end, done + (size_t)__builtin_ctzll(mask | LAST_BIT));
        } while (mask);
        end = next;
    }
    for (; done < elements; done++, a += itemsize, b += itemsize)
        if (memcmp(a, b, itemsize))
            end = put_place(end, done);
    return (size_t)(end - places) / 2;
}

#define BLOCK_DIFF(NAME, DIFFER, ITEMSIZE, TARGET)                                                           \
    TARGET static size_t NAME(const uint8_t *a, const uint8_t *b, size_t elements, uint8_t *places) {        \
        return diff_block_with(DIFFER, ITEMSIZE, a, b, elements, places);                                    \
    }

#define NO_TARGET
BLOCK_DIFF(diff_block_8, differ_8, 1, NO_TARGET)
BLOCK_DIFF(diff_block_16, differ_16, 2, NO_TARGET)
BLOCK_DIFF(diff_block_32, differ_32, 4, NO_TARGET)
BLOCK_DIFF(diff_block_64, differ_64, 8, NO_TARGET)

#if defined(__x86_64__)
#define WITH_AVX2 __attribute__((target("avx2,bmi,popcnt")))
#define VECTOR(address, number) _mm256_loadu_si256((const __m256i *)(address) + (number))

WITH_AVX2 static inline uint64_t low_bits(int mask) { return (uint32_t)mask; }

WITH_AVX2 static inline uint64_t differ_8_avx2(const uint8_t *a, const uint8_t *b) {
    uint64_t equal = 0;
    for (int i = 0; i < 2; i++)
        equal |= low_bits(_mm256_movemask_epi8(_mm256_cmpeq_epi8(VECTOR(a, i), VECTOR(b, i)))) << 32 * i;
    return ~equal;
}

WITH_AVX2 static inline uint64_t differ_16_avx2(const uint8_t *a, const uint8_t *b) {
    uint64_t equal = 0;
    for (int i = 0; i < 2; i++) {
        __m256i low = _mm256_cmpeq_epi16(VECTOR(a, 2 * i), VECTOR(b, 2 * i));
        __m256i high = _mm256_cmpeq_epi16(VECTOR(a, 2 * i + 1), VECTOR(b, 2 * i + 1));
        __m256i both = _mm256_permute4x64_epi64(_mm256_packs_epi16(low, high), 0xd8);
        equal |= low_bits(_mm256_movemask_epi8(both)) << 32 * i;
    }
    return ~equal;
}

WITH_AVX2 static inline uint64_t differ_32_avx2(const uint8_t *a, const uint8_t *b) {
    uint64_t equal = 0;
    for (int i = 0; i < 8; i++) {
        __m256i same = _mm256_cmpeq_epi32(VECTOR(a, i), VECTOR(b, i));
        equal |= low_bits(_mm256_movemask_ps(_mm256_castsi256_ps(same))) << 8 * i;
    }
    return ~equal;
}

WITH_AVX2 static inline uint64_t differ_64_avx2(const uint8_t *a, const uint8_t *b) {
    uint64_t equal = 0;
    for (int i = 0; i < 16; i++) {
        __m256i same = _mm256_cmpeq_epi64(VECTOR(a, i), VECTOR(b, i));
        equal |= low_bits(_mm256_movemask_pd(_mm256_castsi256_pd(same))) << 4 * i;
    }
    return ~equal;
}

BLOCK_DIFF(diff_block_8_avx2, differ_8_avx2, 1, WITH_AVX2)
BLOCK_DIFF(diff_block_16_avx2, differ_16_avx2, 2, WITH_AVX2)
BLOCK_DIFF(diff_block_32_avx2, differ_32_avx2, 4, WITH_AVX2)
BLOCK_DIFF(diff_block_64_avx2, differ_64_avx2, 8, WITH_AVX2)
#endif

static block_diff block_diff_of(uint64_t itemsize, int portable) {
#if defined(__x86_64__)
    if (!portable && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi"))
        return itemsize == 1   ? diff_block_8_avx2
               : itemsize == 2 ? diff_block_16_avx2
               : itemsize == 4 ? diff_block_32_avx2
                               : diff_block_64_avx2;
#else
    (void)portable;
#endif
    return itemsize == 1   ? diff_block_8
           : itemsize == 2 ? diff_block_16
           : itemsize == 4 ? diff_block_32
                           : diff_block_64;
}

/* -- records */

/* From `from` to `into`: `gather` takes elements at `places` to adjacent ones, the other way is `scatter`. */
#define MOVE_ELEMENTS(ITEMSIZE)                                                                              \
    static void gather_##ITEMSIZE(uint8_t *into, const uint8_t *from, const uint8_t *places, size_t count) { \
        for (size_t i = 0; i < count; i++) {                                                                 \
            uint16_t place;                                                                                  \
            memcpy(&place, places + 2 * i, 2);                                                               \
            memcpy(into + ITEMSIZE * i, from + (size_t)ITEMSIZE * place, ITEMSIZE);                          \
        }                                                                                                    \
    }                                                                                                        \
    static void scatter_##ITEMSIZE(uint8_t *into, const uint8_t *from, const uint8_t *places,                \
                                   size_t count) {                                                           \
        for (size_t i = 0; i < count; i++) {                                                                 \
            uint16_t place;                                                                                  \
            memcpy(&place, places + 2 * i, 2);                                                               \
            memcpy(into + (size_t)ITEMSIZE * place, from + ITEMSIZE * i, ITEMSIZE);                          \
        }                                                                                                    \
    }

MOVE_ELEMENTS(1)
MOVE_ELEMENTS(2)
MOVE_ELEMENTS(4)
MOVE_ELEMENTS(8)

typedef void (*move_elements)(uint8_t *into, const uint8_t *from, const uint8_t *places, size_t count);

static move_elements gather_of(uint64_t itemsize) {
    return itemsize == 1 ? gather_1 : itemsize == 2 ? gather_2 : itemsize == 4 ? gather_4 : gather_8;
}

static move_elements scatter_of(uint64_t itemsize) {
    return itemsize == 1 ? scatter_1 : itemsize == 2 ? scatter_2 : itemsize == 4 ? scatter_4 : scatter_8;
}

static inline size_t elements_of_block(uint64_t elements, uint64_t block) {
    uint64_t left = elements - block * DIFF_BLOCK;
    return left < DIFF_BLOCK ? (size_t)left : DIFF_BLOCK;
}

/* Write the record of a piece to `record`, of which `most + DIFF_SLACK` bytes may be written to. Returns its
 * size; 0 if nothing differs, TOO_MANY_CHANGES if it would take more than `most` bytes. */
static uint32_t diff_piece_into(const diff_piece *piece, uint64_t most, uint8_t *record, int portable) {
    const uint8_t *base = (const uint8_t *)(uintptr_t)piece->base,
                  *changed = (const uint8_t *)(uintptr_t)piece->changed;
    uint64_t itemsize = piece->itemsize, elements = piece->nbytes / itemsize, blocks = blocks_of(elements),
             total = 0;
    uint64_t head = to_eight(4 * blocks);
    block_diff diff = block_diff_of(itemsize, portable);
    if (head > most)
        return memcmp(base, changed, piece->nbytes) ? TOO_MANY_CHANGES : 0;
    memset(record, 0, head);
    for (uint64_t block = 0; block < blocks; block++) {
        uint64_t start = block * DIFF_BLOCK * itemsize;
        size_t found = diff(base + start, changed + start, elements_of_block(elements, block),
                            record + head + 2 * total);
        uint32_t count = (uint32_t)found;
        memcpy(record + 4 * block, &count, 4);
        total += found;
        if (total && record_bytes(blocks, total, itemsize) > most)
            return TOO_MANY_CHANGES;
    }
    if (!total)
        return 0;
    uint8_t *places = record + head, *elements_at = places + to_eight(2 * total);
    memset(places + 2 * total, 0, (size_t)(elements_at - (places + 2 * total)));
    uint8_t *into = elements_at;
    for (uint64_t block = 0; block < blocks; block++) {
        uint32_t count;
        memcpy(&count, record + 4 * block, 4);
        gather_of(itemsize)(into, changed + block * DIFF_BLOCK * itemsize, places, count);
        places += 2 * (size_t)count;
        into += itemsize * count;
    }
    uint64_t size = record_bytes(blocks, total, itemsize);
    memset(into, 0, (size_t)(record + size - into));
    return (uint32_t)size;
}

/* Whether the places of a block ascend, and the last is below `elements`. */
static int places_ascend(const uint8_t *places, size_t count, size_t elements) {
    uint16_t before, place;
    unsigned wrong = 0;
    for (size_t i = 1; i < count; i++) {
        memcpy(&before, places + 2 * i - 2, 2);
        memcpy(&place, places + 2 * i, 2);
        wrong |= place <= before;
    }
    if (count)
        memcpy(&place, places + 2 * count - 2, 2);
    return !wrong && (!count || place < elements);
}

static int are_zeros(const uint8_t *from, const uint8_t *until) {
    unsigned found = 0;
    while (from < until)
        found |= *from++;
    return !found;
}

/* Whether the record can be that of the piece: then applying it writes inside of the piece only. */
static int has_own_record(const patch_piece *piece) {
    const uint8_t *record = (const uint8_t *)(uintptr_t)piece->record;
    uint64_t size = piece->size;
    uint64_t elements = piece->nbytes / piece->itemsize, blocks = blocks_of(elements), total = 0;
    uint64_t head = to_eight(4 * blocks);
    if (size < head)
        return 0;
    for (uint64_t block = 0; block < blocks; block++) {
        uint32_t count;
        memcpy(&count, record + 4 * block, 4);
        if (count > elements_of_block(elements, block))
            return 0;
        total += count;
    }
    if (!total || size != record_bytes(blocks, total, piece->itemsize))
        return 0;
    const uint8_t *places = record + head, *elements_at = places + to_eight(2 * total);
    if (!are_zeros(record + 4 * blocks, places) || !are_zeros(places + 2 * total, elements_at) ||
        !are_zeros(elements_at + total * piece->itemsize, record + size))
        return 0;
    for (uint64_t block = 0; block < blocks; block++) {
        uint32_t count;
        memcpy(&count, record + 4 * block, 4);
        if (!places_ascend(places, count, elements_of_block(elements, block)))
            return 0;
        places += 2 * (size_t)count;
    }
    return 1;
}

/* Write the elements of a record that `has_own_record` accepts over those of the piece. */
static void apply_record(const patch_piece *piece) {
    const uint8_t *record = (const uint8_t *)(uintptr_t)piece->record;
    uint8_t *into = (uint8_t *)(uintptr_t)piece->into;
    uint64_t elements = piece->nbytes / piece->itemsize, blocks = blocks_of(elements), total = 0;
    for (uint64_t block = 0; block < blocks; block++) {
        uint32_t count;
        memcpy(&count, record + 4 * block, 4);
        total += count;
    }
    const uint8_t *places = record + to_eight(4 * blocks), *from = places + to_eight(2 * total);
    for (uint64_t block = 0; block < blocks; block++) {
        uint32_t count;
        memcpy(&count, record + 4 * block, 4);
        scatter_of(piece->itemsize)(into + block * DIFF_BLOCK * piece->itemsize, from, places, count);
        places += 2 * (size_t)count;
        from += (size_t)count * piece->itemsize;
    }
}

/* -- many pieces */

static inline int is_whole_number(uint64_t nbytes, uint64_t itemsize) {
    int known = itemsize == 1 || itemsize == 2 || itemsize == 4 || itemsize == 8;
    return known && nbytes % itemsize == 0 && nbytes <= (uint64_t)1 << 30;
}

/* Write the records of pieces one after the other, and their sizes, as long as there is room for the next;
 * returns how many pieces are done. A record takes at most half of the bytes of its piece. */
static uint64_t diff_pieces_into(const diff_piece *pieces, uint64_t count, uint8_t *records, uint64_t room,
                                 uint32_t *sizes, int portable) {
    uint64_t used = 0;
    for (uint64_t i = 0; i < count; i++) {
        uint64_t most = pieces[i].nbytes / 2;
        if (used + most + DIFF_SLACK > room)
            return i;
        sizes[i] = diff_piece_into(&pieces[i], most, records + used, portable);
        used += sizes[i] == TOO_MANY_CHANGES ? 0 : sizes[i];
    }
    return count;
}

/* Make pieces from their bases, with the checksums of those of DIGEST_LEAST bytes or more, which are taken
 * while the bytes are in the cache; returns how many are done: it stops before a piece that fails
 * `has_own_record`. */
static uint64_t patch_pieces_into(const patch_piece *pieces, uint64_t count, uint64_t *sums) {
    for (uint64_t i = 0; i < count; i++) {
        const patch_piece *piece = &pieces[i];
        if (piece->size && !has_own_record(piece))
            return i;
        if (piece->into != piece->base)
            memcpy((void *)(uintptr_t)piece->into, (const void *)(uintptr_t)piece->base, piece->nbytes);
        if (piece->size)
            apply_record(piece);
        if (piece->nbytes >= DIGEST_LEAST)
            sums[i] = digest_copy_piece((const uint8_t *)(uintptr_t)piece->into, NULL, piece->nbytes, 0);
    }
    return count;
}

/* -- for Python */

/* diff_pieces(pieces, count, records, room, sizes, portable): see element_diff.h; all but the counts are
 * addresses. */
PyObject *diff_pieces(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    uint64_t a[6], done;
    if (!parse_numbers(args, count, 6, a) || !is_memory(a[0], a[1]) || !is_memory(a[2], a[3]) ||
        !is_memory(a[4], a[1]))
        return NULL;
    const diff_piece *pieces = (const diff_piece *)(uintptr_t)a[0];
    for (uint64_t i = 0; i < a[1]; i++)
        if (!is_whole_number(pieces[i].nbytes, pieces[i].itemsize) ||
            !is_memory(pieces[i].base, pieces[i].nbytes) || !is_memory(pieces[i].changed, pieces[i].nbytes)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError,
                                "a piece is not a whole number of elements of 1, 2, 4 or 8 bytes");
            return NULL;
        }
    Py_BEGIN_ALLOW_THREADS;
    done = diff_pieces_into(pieces, a[1], (uint8_t *)(uintptr_t)a[2], a[3], (uint32_t *)(uintptr_t)a[4],
                            (int)a[5]);
    Py_END_ALLOW_THREADS;
    return PyLong_FromUnsignedLongLong(done);
}

/* patch_pieces(pieces, count, sums): make `count` pieces, described at address `pieces`, from their bases and
 * records. */
PyObject *patch_pieces(PyObject *module, PyObject *const *args, Py_ssize_t count) {
    (void)module;
    uint64_t a[3], done;
    if (!parse_numbers(args, count, 3, a) || !is_memory(a[0], a[1]) || !is_memory(a[2], a[1]))
        return NULL;
    const patch_piece *pieces = (const patch_piece *)(uintptr_t)a[0];
    for (uint64_t i = 0; i < a[1]; i++)
        if (!is_whole_number(pieces[i].nbytes, pieces[i].itemsize) ||
            !is_memory(pieces[i].base, pieces[i].nbytes) || !is_memory(pieces[i].into, pieces[i].nbytes) ||
            !is_memory(pieces[i].record, pieces[i].size)) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError,
                                "a piece is not a whole number of elements of 1, 2, 4 or 8 bytes");
            return NULL;
        }
    Py_BEGIN_ALLOW_THREADS;
    done = patch_pieces_into(pieces, a[1], (uint64_t *)(uintptr_t)a[2]);
    Py_END_ALLOW_THREADS;
    return PyLong_FromUnsignedLongLong(done);
}
